"""What transformers leaves to chance in a training step and no measurement should."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def chances(module: nn.Module) -> tuple[str, ...]:
    """Return what a model leaves to chance: layers that LayerDrop skips, features that SpecAugment masks."""
    found = {name for owner in _owners(module) for name in _switches(owner)}
    told = ("LayerDrop" if name.endswith("layerdrop") else "SpecAugment" for name in found)
    return tuple(sorted(set(told)))


@contextmanager
def steady(module: nn.Module) -> Iterator[None]:
    """Run all layers of a model on all of its features inside the block; its config has its own values afterwards.

    Which layers LayerDrop skips is drawn anew in each step, so that no two steps would need the same memory.
    """
    before = [(owner, name, getattr(owner, name)) for owner in _owners(module) for name in _switches(owner)]
    for owner, name, value in before:
        setattr(owner, name, type(value)(0))
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _owners(module: nn.Module) -> list[Any]:
    parts = list(module.modules())
    configs = {id(part.config): part.config for part in parts if hasattr(part, "config")}
    return [*parts, *configs.values()]


def _switches(owner: Any) -> list[str]:
    values = getattr(owner, "__dict__", {})  # a config may be anything
    drops = [name for name, value in values.items() if name.endswith("layerdrop") and type(value) is float and value]
    return [*drops, *(["apply_spec_augment"] if values.get("apply_spec_augment") is True else [])]
