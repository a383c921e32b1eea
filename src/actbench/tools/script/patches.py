"""Attributes of torch that are replaced for a while, and Ctrl-C, which waits until all of them are, or are restored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from actbench.simulator.overrides import attribute


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
