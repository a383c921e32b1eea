"""Which storages stand for host memory.

The simulated meter runs on fake cpu tensors, where a device says nothing about where bytes lie. What moves bytes to
host memory therefore marks the storage it moved them to, and what counts device bytes asks here.
"""

from __future__ import annotations

import weakref

import torch

_marked: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def mark(storage: torch.UntypedStorage) -> None:
    """Say that ``storage`` lies in host memory; forgotten when the storage dies."""
    _marked.add(storage)


def is_host(storage: torch.UntypedStorage) -> bool:
    """Return whether ``storage`` was marked as lying in host memory."""
    return storage in _marked
