"""Model folders as ``save_pretrained`` writes them. They are not trusted: config.json and safetensors are read, and
nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from actbench.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        ModelError: It is missing, unreadable, or holds no JSON object with a ``model_type``.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is no model folder as save_pretrained writes it")
    config = _read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} has no model_type: it is not the config of a transformers model")
    if not isinstance(config.get("auto_map", {}), dict):
        raise ModelError(f"{path}: auto_map is not an object")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: architectures is not a list of class names")
    if "quantization_config" in config:
        raise ModelError(f"{path} describes quantized weights (quantization_config), which cannot be trained in full")
    return config


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a folder; none when it holds no weights at all.

    Raises:
        ModelError: The weights are pickles, or the index is broken or names files outside the folder.
    """
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    pickles = sorted(path for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{pickles[0]} is a pickle, and reading one runs the code in it, so actbench does not. If you trust it, "
            "convert it once: load it with from_pretrained and write it with save_pretrained, which makes safetensors"
        )
    return ()


def read_tensors(files: tuple[Path, ...]) -> dict[str, Tensor]:
    """Read all tensors of some safetensors files.

    Raises:
        ModelError: A file is missing, truncated or broken.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors.update(load_file(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as safetensors (truncated or broken?): {error}") from error
    return tensors


def _indexed_files(folder: Path) -> tuple[Path, ...]:
    path = folder / INDEX
    index = _read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ModelError(f"{path} has no weight_map from tensors to files")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{path} names {name!r}, which is not a safetensors file of this folder")
    return tuple(folder / name for name in names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content
