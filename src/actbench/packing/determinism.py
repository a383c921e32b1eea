"""Whether a step waits for the device before it allocates bits: a measurement must, training must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_waits: ContextVar[bool] = ContextVar("_waits", default=False)


@contextmanager
def deterministic_bits() -> Iterator[None]:
    """Wait for the device in each step of the block that allocates bits, as measurements must.

    The bits of a step then depend only on earlier steps, not on the progress of the device.
    """
    token = _waits.set(True)
    try:
        yield
    finally:
        _waits.reset(token)


def must_sync() -> bool:
    """Return whether this code runs inside :func:`deterministic_bits`."""
    return _waits.get()
