"""Moves saved tensors to host memory and back, and counts what is there.

Both moves are operators, so that a meter on fake tensors sees bytes leave. They run on the current stream and do not
wait: torch's allocators reuse a block only after the work queued on it. No allocator of a device tells what host memory
schemes use, so real storages there are noted.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from actbench.ops.library import EVERYWHERE, define

_noted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def note(storage: torch.UntypedStorage) -> None:
    """Count the bytes of a real storage as host memory until it is freed."""
    _noted.add(storage)


def noted_bytes() -> int:
    """Return the bytes of all storages that were noted."""
    return sum(storage.nbytes() for storage in list(_noted))


def _to_host(x: Tensor) -> Tensor:
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
    note(host.untyped_storage())
    return host


def _from_host(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


@define("to_host(Tensor x) -> Tensor", {EVERYWHERE: _to_host}, tags=())
def to_host(x: Tensor) -> Tensor:
    """Return a copy of ``x`` in host memory, page-locked where ``x`` is on a CUDA device."""
    return torch.empty_like(x, device="cpu")


@define("from_host(Tensor host, Device device) -> Tensor", {EVERYWHERE: _from_host}, tags=())
def from_host(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of ``host`` on ``device``."""
    return torch.empty_like(host, device=device)
