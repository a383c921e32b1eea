from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actbench.errors import ModelError
from actbench.workload.folder import read_config, read_tensors, weight_files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "holds no config.json"),
        ("{", "config.json cannot be read as JSON"),
        ("[1]", "holds no JSON object"),
        ("{}", "has no model_type"),
        ('{"model_type": 3}', "has no model_type"),
        ('{"model_type": "bert", "auto_map": null}', "auto_map is not an object"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"model_type": "bert", "quantization_config": {}}', "quantized"),
    ],
)
def test_a_broken_config_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ModelError, match=words):
        read_config(tmp_path)


def test_weights_come_from_one_file_or_from_those_of_the_index(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({f"w{number}": torch.full((2,), float(number))}, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": {"w1": "model-1.safetensors", "w2": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    tensors = read_tensors(weight_files(tmp_path))

    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"w1": [1.0, 1.0], "w2": [2.0, 2.0]}


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("nonsense", "cannot be read as JSON"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"w": "../outside.safetensors"}}', "not a safetensors file of this folder"),
        ('{"weight_map": {"w": "pytorch_model.bin"}}', "not a safetensors file of this folder"),
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, index: str, words: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(ModelError, match=words):
        weight_files(tmp_path)


def test_pickles_are_refused_and_the_message_says_how_to_convert(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1)}, tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        weight_files(tmp_path)


def test_a_folder_without_weights_has_no_weight_files(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == ()


@pytest.mark.parametrize("kept", [0, 4, 40, -8])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_tensors((path,))
