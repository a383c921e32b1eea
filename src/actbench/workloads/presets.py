from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from actbench.results.records import Task


@dataclass(frozen=True)
class Preset:
    """The architecture of a well-known Hugging Face model, shipped with the package.

    Attributes:
        name: What it is called in model specifications.
        task: What ``--task auto`` means.
        note: One line for ``actbench models``.
        config: What its ``config.json`` says about the architecture.
        hub: Repositories with the published weights, the preferred one first; empty for made-up models.
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


def find(name: str) -> Preset | None:
    """Return the preset of this name, of another name of it, or of one of its hub repositories."""
    for preset in presets().values():
        if name in (preset.name, *preset.also, *preset.hub):
            return preset
    return None


def _preset(name: str, tables: dict[str, Any]) -> Preset:
    table = tables[name]
    base = _preset(table["like"], tables) if "like" in table else None
    return Preset(
        name=name,
        task=table["task"] if base is None else table.get("task", base.task),
        note=table["note"],
        config={**(base.config if base else {}), **table["config"]},
        hub=tuple(table.get("hub", ())),
        also=tuple(table.get("also", ())),
    )
