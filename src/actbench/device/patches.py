"""Replaces attributes and entries inside a block, and restores them after it; Ctrl-C waits until all are."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch.utils import _device

Key = TypeVar("Key")
Value = TypeVar("Value")


_MISSING = object()


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the block; one that the owner only inherits is deleted again after it."""
    own = vars(owner).get(name, _MISSING)
    shown = getattr(owner, name, _MISSING) if own is _MISSING else own
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is not _MISSING:
            setattr(owner, name, own)
        else:
            delattr(owner, name)
            # torch's configs keep what is set elsewhere than in their attributes, and hide what is deleted
            if shown is not _MISSING and not hasattr(owner, name):
                setattr(owner, name, shown)


@contextmanager
def replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the block, replace an attribute, if it exists, by the result of ``change``.

    The tracer of torch.compile lists torch's functions when it traces for the first time. A list that was made inside
    the block is forgotten: it has the replacement, and no code that calls the function could be compiled any more.
    """
    if not hasattr(owner, name):
        yield
        return
    _device._device_constructors()  # which torch lists once, at the latest now: ``with torch.device`` looks for its own
    had_list = _tracers_list() is not None
    try:
        with attribute(owner, name, change(getattr(owner, name))):
            yield
    finally:
        if not had_list and (listing := _tracers_list()) is not None:
            listing.cache_clear()


def _tracers_list() -> Any:
    """Return the cached function that lists torch's functions for torch.compile; None if it was not called yet."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return rules.get_torch_obj_rule_map if rules and rules.get_torch_obj_rule_map.cache_info().currsize else None


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


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Inside the block, let Ctrl-C wait for the end of the block; other threads than the main one get none."""
    own = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or own is None:  # None: set by another language
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
        if came:
            signal.raise_signal(signal.SIGINT)
