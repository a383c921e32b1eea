from __future__ import annotations

from pathlib import Path

import pytest

from actbench.errors import ModelError
from actbench.workload.names import ModelName, parse_model_name


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("roberta-base", ModelName("preset", "roberta-base")),
        ("FacebookAI/roberta-base", ModelName("preset", "roberta-base")),
        ("hf:roberta-base", ModelName("preset", "roberta-base")),
        ("vit-base-patch16-224", ModelName("preset", "google/vit-base-patch16-224")),
        ("resnet50", ModelName("torchvision", "resnet50")),
        ("torchvision:resnet50", ModelName("torchvision", "resnet50")),
        ("hf:org/name", ModelName("hub", "org/name")),
        ("org/name", ModelName("hub", "org/name")),
        ("some/file.py:build", ModelName("function", "some/file.py:build")),
    ],
)
def test_each_form_of_a_specification_is_understood(spec: str, expected: ModelName) -> None:
    assert parse_model_name(spec) == expected


def test_changes_of_the_config_are_read_as_json_values() -> None:
    name = parse_model_name("gpt2@n_layer=4,resid_pdrop=0.0,tie_word_embeddings=false,activation_function=gelu")

    assert name.changes == {
        "n_layer": 4,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": False,
        "activation_function": "gelu",
    }


def test_a_folder_is_found_by_its_path(tmp_path: Path) -> None:
    assert parse_model_name(str(tmp_path)) == ModelName("folder", str(tmp_path))
    assert parse_model_name(f"{tmp_path}@num_hidden_layers=1").changes == {"num_hidden_layers": 1}


def test_a_shipped_name_wins_over_a_folder_of_the_same_bare_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)

    assert parse_model_name("gpt2").kind == "preset"
    assert parse_model_name("./gpt2").kind == "folder"
    assert parse_model_name("mine").kind == "folder"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("robert-base", "did you mean roberta-base"),
        ("resnet5", "did you mean"),
        ("no-such-thing-at-all", "actbench models"),
        ("torchvision:resnet51", "did you mean resnet50|resnet"),
        ("torchvision:keypointrcnn_resnet50_fpn", "detection model, for which actbench makes no batches"),
        ("torchvision:raft_large", "is an optical flow model"),
        ("hf:", "not a name on the hub"),
        ("hf:a/b/c", "not a name on the hub"),
        ("./no/such/folder", "no such folder"),
        ("gpt2@n_layer", "not a new key=value"),
        ("gpt2@n_layer=", "not a new key=value"),
        ("gpt2@n_layer=1,n_layer=2", "not a new key=value"),
        ("resnet50@layers=2", "only Hugging Face models"),
    ],
)
def test_a_wrong_specification_says_what_is_wrong(spec: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse_model_name(spec)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model.pt", "pickles are not read"),
        ("own.py", r"own\.py:build; .*actbench run .*own\.py"),
        ("a.onnx", "not a folder"),
    ],
)
def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / file).write_bytes(b"\x80\x04.")

    with pytest.raises(ModelError, match=words):
        parse_model_name(str(tmp_path / file))
