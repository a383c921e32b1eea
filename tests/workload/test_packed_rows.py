"""Rows that hold several sequences, one behind the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from actbench import workload as workloads
from actbench.errors import ModelError, UsageError
from actbench.measuring.bench import measure
from actbench.model.measured import Measurement
from actbench.model.records import Case

PACKED, LENGTHS = "32,64,20,12", (32, 64, 20, 12)


def of(model: str = "tiny-llama", **fields: Any) -> Case:
    return Case(model=model, gradient_quality=False, **{"batch_size": 2, "meter": "cpu", "packed": PACKED, **fields})


def test_positions_begin_anew_with_each_sequence_and_its_first_token_has_no_label() -> None:
    batch = workloads.load_workload(of()).batch(2, seed=0)

    expected = [position for length in LENGTHS for position in range(length)]
    assert batch["position_ids"].tolist() == [expected, expected]
    assert batch["input_ids"].shape == batch["labels"].shape == (2, sum(LENGTHS))
    first = batch["position_ids"] == 0
    assert bool((batch["labels"][first] == -100).all())
    assert torch.equal(batch["labels"][~first], batch["input_ids"][~first])


def test_no_sequence_sees_another() -> None:
    workload = workloads.load_workload(of(batch_size=1))
    module: Any = workload.setup(materialize=True, seed=0).module.eval()
    batch = workload.batch(1, seed=0)

    def logits(ids: Tensor, positions: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = module(input_ids=ids, position_ids=positions, use_cache=False).logits
        return found

    ids, positions = batch["input_ids"], batch["position_ids"]
    together = logits(ids, positions).split(LENGTHS, dim=1)
    alone = [logits(*parts) for parts in zip(ids.split(LENGTHS, dim=1), positions.split(LENGTHS, dim=1), strict=True)]

    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_the_simulation_agrees_with_the_allocator(model: str) -> None:
    measured = measure(of(model))
    simulated = measure(of(model, meter="simulated", device_profile="cpu"))

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=1e-3)
    assert simulated.activation_bytes == pytest.approx(measured.activation_bytes, rel=1e-3)


def test_on_a_card_rows_of_several_sequences_cost_a_mask_of_all_pairs() -> None:
    def simulated(**fields: Any) -> Measurement:
        return measure(of(meter="simulated", device_profile="rtx-4090", **fields))

    length = sum(LENGTHS)
    packed, plain = simulated(), simulated(packed=None, sequence_length=length)

    more = packed.activation_bytes - plain.activation_bytes
    assert 2 * length**2 * 4 <= more  # of each row, an additive mask in float32
    assert more <= 2 * 2 * length**2 * 5 + 2**16  # at most one a layer, and that of truth values


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        ("tiny-roberta", {}, "does sequence-classification"),
        ("resnet-cifar", {}, "not a causal language model"),
        ("tiny-llama", {"sequence_length": 128}, "leave --sequence-length out"),
        ("tiny-gpt2", {"packed": "4,2000"}, "positions for"),
    ],
)
def test_other_models_and_lengths_are_refused(model: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        measure(of(model, **fields))


@pytest.mark.parametrize("text", ["512", "512,", "0,5", "5,-1", "a,b", "5, 6"])
def test_a_text_that_has_no_lengths_is_refused(text: str, cli: Any) -> None:
    with pytest.raises(UsageError, match="no lengths of packed sequences"):
        of(packed=text)
    ended = cli("measure", "tiny-llama", "--packed", text)

    assert ended.status == 2
    assert "no lengths of packed sequences" in " ".join(ended.err.split())
