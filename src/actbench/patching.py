"""Replaces attributes and entries inside a block, and restores them after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the block; one that the owner only inherits is deleted again after it."""
    has, own = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if has:
            setattr(owner, name, own)
        else:
            delattr(owner, name)


@contextmanager
def entries(table: MutableMapping[Key, Value], values: Mapping[Key, Value]) -> Iterator[None]:
    """Add entries to a mapping inside the block; after it the whole mapping is as before, whatever else was changed."""
    before = dict(table)
    table.update(values)
    try:
        yield
    finally:
        table.clear()
        table.update(before)


class Patches(ExitStack):
    """Attributes and entries that are replaced until the block is left."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace or add the attribute ``name``."""
        self.enter_context(attribute(owner, name, value))

    def replace(self, owner: Any, **values: Any) -> None:
        """Replace attributes, without those that this version of ``owner`` does not have."""
        for name, value in values.items():
            if hasattr(owner, name):
                self.set(owner, name, value)

    def update(self, table: MutableMapping[Key, Value], values: Mapping[Key, Value]) -> None:
        """Add entries to a mapping; see :func:`entries`."""
        self.enter_context(entries(table, values))
