"""The grammar of model specifications.

``roberta-base``                      a shipped preset
``resnet50``, ``torchvision:resnet50``  a torchvision classification model
``hf:org/name``, ``org/name``         a model on the Hugging Face hub, or in its cache
``resnet-cifar``                      a network for small pictures, see smallnets.py
``mlp``                               a network of a plug-in
``./folder``                          a local folder written by ``save_pretrained``
``file.py:function``                  the model that the user's own function returns

Changes of a Hugging Face config follow an @: ``roberta-base@num_hidden_layers=4,hidden_size=128``. So do settings
of a network of a plug-in, and the blocks that a torchvision model is built without:
``resnet50@without=layer1.2/layer2.[2-3]``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final, Literal

from actbench import plugins
from actbench.errors import ModelError
from actbench.model.declared import unknown_model
from actbench.model.modelspecs import is_function
from actbench.model.records import Task
from actbench.paths import from_home
from actbench.units import COUNT_LIMIT
from actbench.workload import folder


@dataclass(frozen=True)
class Preset:
    """The architecture of a well-known Hugging Face model, shipped with the package.

    Attributes:
        task: The task of ``--task auto``.
        note: One line for ``actbench models``.
        config: What its ``config.json`` says about the architecture.
        hub: Repositories with the published weights, the preferred one first.
        also: Other names of the same model.
    """

    name: str
    task: Task
    note: str
    config: dict[str, Any]
    hub: tuple[str, ...]
    also: tuple[str, ...]


@functools.cache
def presets() -> dict[str, Preset]:
    """Return every preset by its name, in the order of ``presets.toml``."""
    tables = tomllib.loads(resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))
    return {name: _preset(name, tables) for name in tables}


def find_preset(name: str) -> Preset | None:
    """Return the preset with this name, this other name or this repository."""
    return next((each for each in presets().values() if name in (each.name, *each.also, *each.hub)), None)


def _preset(name: str, tables: dict[str, Any]) -> Preset:
    table = tables[name]
    base = _preset(table["like"], tables) if "like" in table else None
    return Preset(
        name=name,
        task=table["task"] if base is None else table.get("task", base.task),
        note=table["note"],
        config={**(base.config if base else {}), **table["config"], **dict.fromkeys(table.get("null", ()))},
        hub=tuple(table.get("hub", ())),
        also=tuple(table.get("also", ())),
    )


BLOCKS = "num_hidden_layers"
"""The key of Hugging Face configs for the number of blocks; configs that have another key take this one, too."""

WITHOUT = "without"
"""The key for modules that are left out of a torchvision model, as patterns of paths between slashes."""

Kind = Literal["preset", "hub", "folder", "torchvision", "smallnet", "plugin", "function"]

SMALL_NETS = ("resnet-cifar", "resnet18-cifar", "resnet34-cifar", "inception-cifar")

_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_DIGITS = re.compile(r"-?[0-9]{20,}")
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


_WITHOUT_CONFIG: Final[frozenset[Kind]] = frozenset(("torchvision", "function"))


@dataclass(frozen=True)
class ModelName:
    """A parsed model specification.

    Attributes:
        name: The preset, repository, model or path; for functions ``file.py:function``.
        changes: Keys of the config to change, with their new values; of torchvision's models only :data:`WITHOUT`.
    """

    kind: Kind
    name: str
    changes: dict[str, Any] = field(default_factory=dict)


def parse_model_name(spec: str) -> ModelName:
    """Parse a model specification; a shipped name wins over a local folder of the same bare name.

    Raises:
        ModelError: The specification names nothing known, or does not follow the grammar.
    """
    head, changes = _split_changes(spec)
    name = _parse_name(head)
    if name.kind in _WITHOUT_CONFIG and changes and not (name.kind == "torchvision" and [*changes] == [WITHOUT]):
        raise ModelError(
            f"model {spec!r}: only Hugging Face models and actbench's own take changes after the @, and torchvision's "
            f"{WITHOUT}=PATHS"
        )
    return ModelName(name.kind, name.name, changes)


def takes_changes(spec: str) -> bool:
    """Return whether a model has a config that can be changed: Hugging Face's do, and actbench's own.

    Raises:
        ModelError: As of :func:`parse_model_name`.
    """
    return parse_model_name(spec).kind not in _WITHOUT_CONFIG


def with_blocks(spec: str, count: int) -> str:
    """Return the specification of the same Hugging Face model with another number of blocks."""
    return with_changes(spec, {BLOCKS: count})


def without(spec: str, patterns: Sequence[str]) -> str | None:
    """Return the specification of the same torchvision model without some modules; None if it is no such model."""
    name = parse_model_name(spec)
    return (
        with_changes(spec, {WITHOUT: "/".join(patterns)}) if name.kind == "torchvision" and not name.changes else None
    )


def with_changes(spec: str, more: Mapping[str, int | float | str]) -> str:
    """Return the specification of the same Hugging Face model with these changes of its config, too."""
    head, changes = _split_changes(spec)
    pairs = spec[len(head) + 1 :].split(",") if changes else []
    kept = [pair for pair in pairs if pair.partition("=")[0] not in more]
    return f"{head}@" + ",".join([*kept, *(f"{key}={value}" for key, value in more.items())])


def is_own(spec: str) -> bool:
    """Return whether a specification names a network of actbench or of a plug-in; it need not be trusted."""
    head = spec.partition("@")[0]
    return head in SMALL_NETS or head in plugins.installed("workloads")


def _split_changes(spec: str) -> tuple[str, dict[str, Any]]:
    head, at, tail = spec.rpartition("@")
    # a path may hold an @ of its own
    if not at or ("=" not in tail and os.path.exists(spec)):
        return spec, {}
    changes: dict[str, Any] = {}
    for pair in tail.split(","):
        key, equals, value = pair.partition("=")
        if not equals or not value or not key.isidentifier() or key in changes:
            raise ModelError(f"model {spec!r}: {pair!r} after the @ is not a new key=value")
        changes[key] = _value(value)
    return head, changes


def _value(text: str) -> Any:
    """Read a number, true, false or null as JSON does; anything else is a string."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ModelError(f"model settings: {text!r} is nested too deeply") from None
    except ValueError:
        value = int(text[:20]) if _DIGITS.fullmatch(text) else text  # Python limits the digits of an int
    # written so that NaN, which json reads, is refused too
    if isinstance(value, int | float) and not abs(value) < COUNT_LIMIT:
        raise ModelError(f"model settings: {text} is not a number that 64 bits count")
    return value


def _parse_name(text: str) -> ModelName:
    prefix, colon, rest = text.partition(":")
    if colon and prefix == "torchvision":
        from actbench.workload import torchvision

        torchvision.check_torchvision_name(rest)
        return ModelName("torchvision", rest)
    if colon and prefix == "hf":
        return _hub(rest)
    if is_function(text):
        return ModelName("function", text)
    if text in SMALL_NETS:
        return ModelName("smallnet", text)
    if text in plugins.installed("workloads"):
        return ModelName("plugin", text)
    preset = find_preset(text)
    if preset is not None:
        return ModelName("preset", preset.name)
    if text.startswith((".", "/", "~")) or "\\" in text:
        return _folder(text)
    if "/" in text:
        return _folder(text) if os.path.exists(text) else _hub(text)
    return _bare(text)


def _hub(name: str) -> ModelName:
    preset = find_preset(name)
    if preset is not None:
        return ModelName("preset", preset.name)
    if not (_REPOSITORY.fullmatch(name) and folder.is_repository(name)):
        raise ModelError(
            f"model 'hf:{name}': {name!r} is not a name on the hub; write hf:org/name, of at most 96 letters, digits "
            "and single - _ . between them"
        )
    return ModelName("hub", name)


def _folder(text: str) -> ModelName:
    path = from_home(text)
    if os.path.isdir(path):
        return ModelName("folder", str(path))
    if not os.path.exists(path):
        raise ModelError(f"model {text!r}: there is no such folder")
    if path.suffix == ".py":
        raise ModelError(
            f"model {text!r}: say which function builds the model, as in {text}:build; for a whole training script "
            f"there are 'actbench run {text}' and 'actbench fit --script {text}'"
        )
    reason = "pickles are not read, because reading one runs the code in it" if path.suffix in _PICKLES else ""
    raise ModelError(
        f"model {text!r} is a file, not a folder{f'; {reason}' if reason else ''}: "
        "give a folder with config.json and model.safetensors, as save_pretrained writes it"
    )


def _bare(text: str) -> ModelName:
    from actbench.workload import torchvision

    if text in torchvision.tasks():
        return ModelName("torchvision", text)
    if os.path.exists(text):
        return _folder(text)
    also = (name for preset in presets().values() for name in preset.also)
    known = [*SMALL_NETS, *plugins.installed("workloads"), *presets(), *also]
    raise unknown_model(text, [*known, *torchvision.tasks()])
