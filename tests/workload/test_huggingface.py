from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actbench import workload as workloads
from actbench.errors import ModelError
from actbench.model.records import Case
from actbench.simulator.fake import fake_mode, to_fake
from actbench.workload.huggingface import HuggingFaceWorkload

FAMILIES = {
    "tiny-bert": ("sequence-classification", "masked-lm", "causal-lm"),
    "tiny-roberta": ("sequence-classification", "masked-lm", "causal-lm"),
    "tiny-distilbert": ("sequence-classification", "masked-lm"),
    "tiny-gpt2": ("causal-lm", "sequence-classification"),
    "tiny-t5": ("seq2seq-lm",),
    "tiny-vit": ("image-classification",),
    "tiny-llama": ("causal-lm", "sequence-classification"),
}
WORKLOADS = [(model, task) for model, tasks in FAMILIES.items() for task in tasks]


def load(model: str | Path, **options: object) -> HuggingFaceWorkload:
    workload = workloads.load_workload(Case.model_validate({"model": str(model), "batch_size": 2, **options}))
    assert isinstance(workload, HuggingFaceWorkload)
    return workload


@pytest.mark.sampled(fast=4, slow=6)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("model", "task"), WORKLOADS)
def test_a_step_runs_for_real_and_on_fake_tensors(
    model: str, task: str, attention: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for materialize in (True, False):
        workload = load(model, task=task, attention=attention)
        setup = workload.setup(materialize=materialize, seed=0)
        mode = fake_mode()
        if not materialize:
            to_fake(setup.module, mode).train()
            mode.__enter__()
        try:
            assert setup.loss is not None
            loss = setup.loss(setup.module, workload.batch(2, seed=0))
            loss.backward()
        finally:
            if not materialize:
                mode.__exit__(None, None, None)

        assert loss.shape == ()
        assert setup.module.training
        assert setup.module.config._attn_implementation == attention
        assert [name for name, value in setup.module.named_parameters() if value.grad is None] == []
    assert capfd.readouterr() == ("", "")


def test_a_batch_has_full_length_and_no_padding() -> None:
    workload = load("tiny-roberta", task="masked-lm", sequence_length=40)

    batch = workload.batch(8, seed=0)

    assert {name: tuple(value.shape) for name, value in batch.items()} == {"input_ids": (8, 40), "labels": (8, 40)}
    assert not (batch["input_ids"] == 1).any()  # RoBERTa's padding id
    assert batch["input_ids"].max() < 512
    assert torch.equal(batch["input_ids"], workload.batch(8, seed=0)["input_ids"])
    assert not torch.equal(batch["input_ids"], workload.batch(8, seed=1)["input_ids"])


def test_classifying_decoders_get_a_padding_id_that_no_token_has() -> None:
    workload = load("tiny-gpt2", task="sequence-classification")
    padding = workload.setup(materialize=False, seed=0).module.config.pad_token_id

    assert padding == 511
    assert not (workload.batch(64, seed=0)["input_ids"] == padding).any()


@pytest.mark.parametrize(
    ("model", "length"),
    [("tiny-roberta", 128), ("tiny-roberta@max_position_embeddings=66", 64), ("tiny-bert", 128), ("t5-small", 128)],
)
def test_the_usual_length_is_capped_by_the_positions(model: str, length: int) -> None:
    assert load(model).batch(1, seed=0)["input_ids"].shape == (1, length)


def test_a_length_beyond_the_positions_is_an_error_unless_they_are_relative() -> None:
    with pytest.raises(ModelError, match=r"--sequence-length 129.*positions for 128 tokens"):
        load("tiny-roberta", sequence_length=129)

    assert load("tiny-llama", sequence_length=300).batch(1, seed=0)["input_ids"].shape == (1, 300)
    assert load("tiny-t5", sequence_length=600).batch(1, seed=0)["decoder_input_ids"].shape == (1, 600)


def test_image_size_and_type_follow_the_case() -> None:
    workload = load("tiny-vit", image_size=48, dtype="bfloat16")
    setup = workload.setup(materialize=True, seed=0)
    batch = workload.batch(2, seed=0)
    assert setup.loss is not None

    assert batch["pixel_values"].shape == (2, 3, 48, 48)
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert {value.dtype for value in setup.module.parameters()} == {torch.bfloat16}
    setup.loss(setup.module, batch).backward()


def test_an_image_smaller_than_a_patch_is_an_error() -> None:
    with pytest.raises(ModelError, match="--image-size 7: one patch of this model alone is 8 px"):
        load("tiny-vit", image_size=7)


def test_autocast_is_passed_on_and_the_weights_stay_float32() -> None:
    setup = load("tiny-bert", autocast="bfloat16").setup(materialize=True, seed=0)

    assert setup.precision.autocast == torch.bfloat16
    assert {value.dtype for value in setup.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("materialize", [True, False])
def test_tied_weights_stay_tied(materialize: bool) -> None:
    module = load("tiny-gpt2").setup(materialize=materialize, seed=0).module

    assert module.lm_head.weight is module.transformer.wte.weight


@pytest.mark.parametrize(("model", "ties"), [("llama-3.1-8b", True), ("llama-3.2-1b", False)])
def test_a_specification_decides_whether_weights_are_tied(model: str, ties: bool) -> None:
    """The presets say the opposite."""
    changes = f"num_hidden_layers=1,hidden_size=128,vocab_size=64,tie_word_embeddings={str(ties).lower()}"
    module = load(f"{model}@{changes}").setup(materialize=False, seed=0).module

    assert (module.lm_head.weight is module.model.embed_tokens.weight) is ties


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (load("tiny-bert").setup(materialize=True, seed=seed).module for seed in (1, 1, 2))

    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_a_config_can_be_changed_under_either_name_of_a_key() -> None:
    plain = load("gpt2@n_layer=3,n_embd=48,n_head=2").setup(materialize=False, seed=0).module
    general = load("gpt2@num_hidden_layers=3,hidden_size=48,num_attention_heads=2")

    assert len(plain.transformer.h) == 3
    assert general.setup(materialize=False, seed=0).module.config.to_dict() == plain.config.to_dict()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("roberta-base@num_layer=4", "no key 'num_layer'; did you mean"),
        ("roberta-base@num_hidden_layers=-1", "must not be negative"),
        ("roberta-base@num_hidden_layers=many", "not a valid roberta config"),
        ("roberta-base@hidden_size=100", "cannot be built from its config|not a valid roberta config"),
    ],
)
def test_a_wrong_change_is_an_error(spec: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(spec).setup(materialize=False, seed=0)


def test_a_task_that_the_model_does_not_do_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"--task image-classification: a bert model .* does .*masked-lm"):
        load("tiny-bert", task="image-classification")
