from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from actbench import workloads
from actbench.errors import ModelError
from actbench.fake import fake_mode, to_fake
from actbench.records import Case
from actbench.workloads import hub
from actbench.workloads.huggingface import HuggingFaceWorkload

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
    workload = workloads.load(Case.model_validate({"model": str(model), "batch_size": 2, **options}))
    assert isinstance(workload, HuggingFaceWorkload)
    return workload


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny RoBERTa for masked language modelling, in bfloat16, as save_pretrained writes it."""
    module = load("tiny-roberta", task="masked-lm", dtype="bfloat16").setup(materialize=True, seed=3).module
    module.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


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

    assert setup.autocast_dtype == torch.bfloat16
    assert {value.dtype for value in setup.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("materialize", [True, False])
def test_tied_weights_stay_tied(materialize: bool) -> None:
    module = load("tiny-gpt2").setup(materialize=materialize, seed=0).module

    assert module.lm_head.weight is module.transformer.wte.weight


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


def test_a_folder_gives_its_weights_and_its_task(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    workload = load(saved, weights="auto")
    module = workload.setup(materialize=True, seed=0).module
    original = load("tiny-roberta", task="masked-lm", dtype="bfloat16").setup(materialize=True, seed=3).module

    assert workload.task == "masked-lm"
    assert workload.weights_origin == f"folder:{saved}"
    assert workload.warnings == ()
    for (name, mine), (_, theirs) in zip(module.named_parameters(), original.named_parameters(), strict=True):
        assert mine.dtype == torch.float32, name
        assert torch.equal(mine, theirs.float()), name
    assert "Loading" not in capfd.readouterr().err


def test_a_new_head_is_random_by_the_seed_and_reported(saved: Path) -> None:
    workload = load(saved, weights="pretrained", task="sequence-classification")
    heads = [workload.setup(materialize=True, seed=seed).module.classifier.dense.weight for seed in (1, 1, 2)]

    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert "4 of 41 tensors are not in the weights" in workload.warnings[0]
    assert len(workload.warnings) == 1


def test_random_weights_of_a_folder_leave_its_file_alone(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"broken")
    workload = load(saved, weights="random")

    workload.setup(materialize=True, seed=0)

    assert workload.weights_origin == "random"
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(saved, weights="auto").setup(materialize=True, seed=0)


def test_a_folder_of_pickles_is_refused_whatever_the_policy(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    torch.save({}, saved / "pytorch_model.bin")

    for weights in ("random", "auto", "pretrained"):
        with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
            load(saved, weights=weights)


def test_a_folder_without_weights_gives_random_ones_unless_they_must_be_pretrained(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    workload = load(saved, weights="auto")
    workload.setup(materialize=True, seed=0)

    assert workload.weights_origin == "random"
    assert "holds no safetensors; random weights are used" in workload.warnings[0]
    with pytest.raises(ModelError, match="no pretrained weights"):
        load(saved, weights="pretrained").setup(materialize=True, seed=0)


def test_weights_of_another_shape_or_model_are_an_error(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors does not fit .* in the model"):
        load(f"{saved}@intermediate_size=128", weights="pretrained").setup(materialize=True, seed=0)

    other = load("tiny-gpt2").setup(materialize=True, seed=0).module
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", saved / "model.safetensors")
    with pytest.raises(ModelError, match="holds no weight of"):
        load(saved, weights="pretrained").setup(materialize=True, seed=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "robertaa"}, "knows no model_type 'robertaa'; did you mean roberta"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "--trust-remote-code runs it"),
        ({"num_hidden_layers": "two"}, r"config\.json is not a valid roberta config"),
    ],
)
def test_a_config_that_makes_no_sense_is_an_error_with_its_file(
    saved: Path, change: dict[str, object], words: str
) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, **change}))

    with pytest.raises(ModelError, match=words) as caught:
        load(saved)

    assert str(saved / "config.json") in str(caught.value)


def test_code_of_a_folder_runs_only_when_trusted(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    (saved / "own.py").write_text(
        "from transformers import RobertaConfig, RobertaForMaskedLM\n"
        "class OwnConfig(RobertaConfig):\n    model_type = 'own'\n"
        "class OwnModel(RobertaForMaskedLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((saved / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForMaskedLM": "own.OwnModel"}
    (saved / "config.json").write_text(json.dumps(config))

    workload = load(saved, trust_remote_code=True, weights="auto")

    assert type(workload.setup(materialize=True, seed=0).module).__name__ == "OwnModel"
    assert workload.task == "masked-lm"
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load(saved)

    (saved / "own.py").unlink()
    with pytest.raises(ModelError, match=r"own\.OwnConfig cannot be loaded"):
        load(saved, trust_remote_code=True)


def test_published_weights_are_taken_from_the_cache(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cached", lambda repositories, *, weights: saved)
    workload = load("hf:org/name", weights="auto")
    workload.setup(materialize=True, seed=0)

    assert workload.weights_origin == "pretrained:org/name"
    assert workload.task == "masked-lm"


def test_shapes_alone_need_no_weights(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"broken")
    workload = load(saved, weights="auto")

    workload.setup(materialize=False, seed=0)

    assert workload.weights_origin == "not loaded (shapes only)"


@pytest.mark.parametrize(
    ("model", "task"),
    [("tiny-bert", "sequence-classification"), ("tiny-gpt2", "causal-lm"), ("tiny-t5", "seq2seq-lm")],
)
def test_the_task_of_a_folder_without_architectures_follows_its_kind(model: str, task: str, tmp_path: Path) -> None:
    module = load(model).setup(materialize=True, seed=0).module
    module.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert load(tmp_path).task == task


@pytest.mark.parametrize(("labels", "problem"), [(1, None), (3, "multi_label_classification")])
def test_regression_and_several_labels_train_too(labels: int, problem: str | None, saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "num_labels": labels, "problem_type": problem}))
    workload = load(saved, task="sequence-classification")
    setup = workload.setup(materialize=True, seed=0)
    batch = workload.batch(2, seed=0)
    assert setup.loss is not None

    setup.loss(setup.module, batch).backward()

    assert batch["labels"].is_floating_point()
