"""The names of models and devices, read from the files that they are declared in."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from actbench import plugins
from actbench.errors import ModelError, UsageError
from actbench.model.declared.functions import check_function

DEFAULT_DEVICE: Final = "cuda-16gib"
"""The device that is simulated where none is named."""

_PACKAGE = Path(__file__).parents[2]
_CHANGES = re.compile(r"\w+=[^,]+(,\w+=[^,]+)*")
_NOT_SPELLED = re.compile(r"nvidia|geforce|tesla|amd|instinct|rtx|[\W_]")
_REGISTERED = re.compile(r"^@register_model\(\)\n(?:[@ )].*\n)*def (\w+)", re.MULTILINE)


def check_model(spec: str, *, elsewhere: bool = False) -> None:
    """Check a model's name, if it is one of actbench's own or torchvision's, or of a function in a file.

    Folders and names on the hub are not looked at. With ``elsewhere``, cases run on other machines, which have their
    own files at absolute paths.

    Raises:
        ModelError: There is no such model; the message has the closest names.
    """
    check_function(spec, elsewhere=elsewhere)
    bare, at, changes = spec.rpartition("@") if "@" in spec else (spec, "", "")
    if at and not _CHANGES.fullmatch(changes):
        return  # which is said when the name is read
    known, hidden = _models()
    if re.fullmatch(r"[\w-]+", bare) and not os.path.exists(bare) and bare not in (*known, *hidden):
        raise unknown_model(bare, known)


def unknown_model(name: str, known: Sequence[str]) -> ModelError:
    """Return the error about a bare name that is not among the known ones."""
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return ModelError(
        f"there is no model {name!r}; {hint}see 'actbench models' for the shipped names; others are written "
        "hf:org/name (the hub), ./folder (a local folder) or file.py:function (your own code)"
    )


def device_named(text: str) -> str:
    """Return the name of the device profile that a text names, or that of a file, which is not looked at.

    ``RTX 4090``, ``4090`` and ``NVIDIA GeForce RTX 4090`` are rtx-4090; ``h100`` is the usual one of its kind.

    Raises:
        UsageError: There is no such profile; the message has the closest names.
    """
    if text.endswith(".toml"):
        return text
    found = _devices().get(_spelled(text))
    if found is None:
        known = device_names()
        close = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
        raise UsageError(f"--device-profile {text!r}: there is no such device profile; {hint}")
    return found


def device_names() -> list[str]:
    """Return the names of the shipped device profiles."""
    return ["cpu", *_table("simulator/devices.toml")]


def other_names(device: str) -> tuple[str, ...]:
    """Return the other names of a device profile that :func:`device_named` takes."""
    return tuple(_table("simulator/devices.toml").get(device, {}).get("also", ()))


def model_names() -> list[str]:
    """Return the names of models that need neither a folder nor the hub."""
    return _models()[0]


@functools.cache
def _devices() -> dict[str, str]:
    """Return the names of device profiles by each of their names, as :func:`_spelled` writes them."""
    return {_spelled(each): name for name in device_names() for each in (name, *other_names(name))}


def _spelled(text: str) -> str:
    """Return a device's name without blanks, dashes, capitals and the words that makers put before it."""
    return _NOT_SPELLED.sub("", text.lower())


def _table(file: str) -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((_PACKAGE / file).read_text(encoding="utf-8"))


@functools.cache
def _models() -> tuple[list[str], list[str]]:
    """Return the names of models, and those of repositories of the hub that stand for some."""
    presets = _table("workload/presets.toml")
    own = [*_literal("names.py", "SMALL_NETS"), *plugins.installed("workloads")]
    also, hub = ([name for each in presets.values() for name in each.get(key, ())] for key in ("also", "hub"))
    return [*own, *presets, *also, *_of_torchvision()], hub


def _literal(file: str, name: str) -> list[str]:
    """Return the texts of a tuple that a file of workloads gives a name."""
    for node in ast.parse((_PACKAGE / "workload" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{file} defines no {name}")


def _of_torchvision() -> list[str]:
    """Return the names of torchvision's models that actbench can train, read from its files."""
    found = importlib.util.find_spec("torchvision")
    places = [] if found is None else found.submodule_search_locations or []
    folders = ("models", "models/segmentation", "models/detection")
    files = [file for place in places for folder in folders for file in Path(place).glob(f"{folder}/*.py")]
    names = [name for file in files for name in _REGISTERED.findall(file.read_text(encoding="utf-8"))]
    return sorted(name for name in names if not name.startswith("keypoint"))
