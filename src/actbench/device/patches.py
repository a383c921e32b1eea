"""Attributes of torch that are replaced for a while, and Ctrl-C, which waits until all of them are, or are restored."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils import _device


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside the block, give an owner an attribute; one that it only inherits is no own one of it afterwards."""
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


class Patches(ExitStack):
    """Replaced attributes of modules and classes; leaving the block gives each owner back what it had."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Give ``owner`` the attribute ``name``, which it may lack so far."""
        self.enter_context(attribute(owner, name, value))

    def replace(self, owner: Any, **values: Any) -> None:
        """Replace those attributes that ``owner`` has; what this version of torch lacks stays away."""
        for name, value in values.items():
            if hasattr(owner, name):
                self.set(owner, name, value)


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
