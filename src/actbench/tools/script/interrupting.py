"""Lets Ctrl-C wait until all of several attributes are replaced, or restored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
