"""What a model builds for attention on fake tensors is what it builds on real ones."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import BartConfig, masking_utils

from actbench.measuring.bench import Session
from actbench.model.records import Case
from actbench.simulator import overrides
from actbench.simulator.fake import fake_mode


@pytest.mark.parametrize("scheme", ["exact", pytest.param("smaq", marks=pytest.mark.slow)])
def test_a_decoder_is_simulated_without_the_mask_that_no_real_step_has(scheme) -> None:
    def reading(meter, profile):
        case = Case(
            model="tiny-llama@num_hidden_layers=1",
            scheme=scheme,
            batch_size=16,
            sequence_length=128,
            meter=meter,
            device_profile=profile,
            gradient_quality=False,
        )
        return Session(case).memory()

    simulated, measured = reading("simulated", "cpu"), reading("cpu", None)

    assert simulated.activation_bytes == pytest.approx(measured.activation_bytes, rel=0.002)
    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.002)


OWN = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    def plain():
        def make_batch(n):
            return {"x": torch.randint(100, (n, 64))}
        def loss(model, batch):
            return model(input_ids=batch["x"], labels=batch["x"], use_cache=False).loss
        return LlamaForCausalLM(LlamaConfig(vocab_size=100, **SIZES)), make_batch, loss
    def masked():
        model, make_batch, _ = plain()
        def loss(model, batch):
            return model(input_ids=batch["x"], labels=batch["x"], attention_mask=batch["attention_mask"]).loss
        def padded(n):
            return {**make_batch(n), "attention_mask": torch.arange(64).expand(n, 64).ge(8).long()}
        return model, padded, loss
"""


def activation_bytes(model: str, meter: str, **options) -> int:
    profile = "cpu" if meter == "simulated" else None
    case = Case(model=model, batch_size=16, meter=meter, device_profile=profile, gradient_quality=False, **options)
    return Session(case).memory().activation_bytes


@pytest.mark.parametrize("function", ["plain", "masked"])
def test_a_decoder_of_ones_own_is_simulated_with_the_masks_that_its_batches_ask_for(function, tmp_path) -> None:
    file = tmp_path / "own.py"
    file.write_text(textwrap.dedent(OWN))

    simulated, measured = (activation_bytes(f"{file}:{function}", meter) for meter in ("simulated", "cpu"))

    assert simulated == pytest.approx(measured, rel=0.002)


BART = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}


def test_an_encoder_decoder_is_simulated_without_the_mask_of_ones_that_it_makes_itself(tmp_path) -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64, "vocab_size": 100}
    BartConfig(**sizes, **BART, architectures=["BartForConditionalGeneration"]).save_pretrained(tmp_path)

    simulated, measured = (
        activation_bytes(str(tmp_path), meter, sequence_length=64, weights="random") for meter in ("simulated", "cpu")
    )

    assert simulated == pytest.approx(measured, rel=0.002)


def test_a_number_that_is_drawn_to_drop_no_layer_has_a_value_among_fakes() -> None:
    with fake_mode():
        with overrides.no_layerdrop_draws():
            assert not torch.rand([]) < 0.0  # as layers of transformers ask, at a rate of 0
            assert isinstance(torch.rand(2, 3), FakeTensor)
        assert isinstance(torch.rand([]), FakeTensor)


def test_transformers_looks_again_afterwards_and_at_real_values_all_the_time() -> None:
    looks_up, positions = masking_utils.find_packed_sequence_indices, torch.arange(6).view(1, 6) % 3
    with overrides.full_rows({}):
        assert masking_utils.find_packed_sequence_indices(positions).tolist() == [[0, 0, 0, 1, 1, 1]]
        with fake_mode():
            assert masking_utils.find_packed_sequence_indices(torch.arange(6).view(1, 6)) is None
    with overrides.full_rows({"position_ids": positions}):
        assert masking_utils.find_packed_sequence_indices is looks_up

    assert masking_utils.find_packed_sequence_indices is looks_up
