from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from actbench import workload as workloads
from actbench.errors import ModelError
from actbench.model.records import Case
from actbench.workload import folder
from actbench.workload.huggingface import HuggingFaceWorkload


def load(model: str | Path, **options: object) -> HuggingFaceWorkload:
    workload = workloads.load_workload(Case.model_validate({"model": str(model), "batch_size": 2, **options}))
    assert isinstance(workload, HuggingFaceWorkload)
    return workload


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny RoBERTa for masked language modelling, in bfloat16, as save_pretrained writes it."""
    module = load("tiny-roberta", task="masked-lm", dtype="bfloat16").setup(materialize=True, seed=3).module
    module.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_folder_gives_its_weights_and_its_task(
    saved: Path, dtype: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    workload = load(saved, weights="auto", dtype=dtype)
    module = workload.setup(materialize=True, seed=0).module
    original = load("tiny-roberta", task="masked-lm", dtype="bfloat16").setup(materialize=True, seed=3).module

    assert workload.task == "masked-lm"
    assert workload.weights_origin == f"folder:{saved}"
    assert workload.warnings == ()
    for (name, mine), (_, theirs) in zip(module.named_parameters(), original.named_parameters(), strict=True):
        assert mine.dtype == (torch.float32 if dtype else torch.bfloat16), name
        assert torch.equal(mine.float(), theirs.float()), name
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
    monkeypatch.setattr(folder, "cached", lambda repositories, *, weights: saved)
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


@pytest.mark.newer_torch("a squared error of bfloat16 and float32 has no backward pass")
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
