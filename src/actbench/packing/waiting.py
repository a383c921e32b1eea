"""Whether a step may wait for the device to decide how tensors are packed: a measurement must, training must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_waits: ContextVar[bool] = ContextVar("_waits", default=False)


@contextmanager
def waiting() -> Iterator[None]:
    """Make steps inside wait for the device when bits are allocated, as measurements must.

    The bits of a step then depend only on earlier steps, not on the progress of the device.
    """
    token = _waits.set(True)
    try:
        yield
    finally:
        _waits.reset(token)


def waits() -> bool:
    """Return whether this code runs inside :func:`waiting`."""
    return _waits.get()
