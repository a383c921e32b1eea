"""Which storages stand for host memory.

The simulated meter runs on fake cpu tensors, where a device says nothing about where bytes lie. What moves bytes to
host memory therefore marks the storage it moved them to, and what counts device bytes asks here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_is_the_device: ContextVar[bool] = ContextVar("_is_the_device", default=False)
_marked: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def mark(storage: torch.UntypedStorage) -> None:
    """Say that ``storage`` lies in host memory; forgotten when the storage dies."""
    _marked.add(storage)


def is_host(storage: torch.UntypedStorage) -> bool:
    """Return whether ``storage`` was marked as lying in host memory."""
    return storage in _marked


@contextmanager
def as_the_device() -> Iterator[None]:
    """Say that fake cpu tensors stand for tensors of the host itself, which have no other place to be moved to."""
    token = _is_the_device.set(True)
    try:
        yield
    finally:
        _is_the_device.reset(token)


def is_the_device() -> bool:
    """Return whether fake cpu tensors stand for tensors of the host itself, and not for those of some device."""
    return _is_the_device.get()
