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

NOTED: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Real storages in host memory that schemes made."""


def noted_bytes() -> int:
    """Return the bytes of all :data:`NOTED` storages."""
    return sum(storage.nbytes() for storage in list(NOTED))


def is_elsewhere(x: Tensor) -> bool:
    """Return whether a tensor is outside of host memory."""
    return x.device.type != "cpu"


def _to_host(x: Tensor) -> Tensor:
    # a copy to memory that is not page-locked would wait for the device
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
    NOTED.add(host.untyped_storage())
    return host


def _from_host(host: Tensor, device: torch.device) -> Tensor:
    # torch's pool hands page-locked memory out again only behind such a copy (CachingHostAllocator's record_event)
    return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


# no tag says that compilers may order the copies or leave them out
@define("to_host(Tensor x) -> Tensor", {EVERYWHERE: _to_host}, tags=())
def to_host(x: Tensor) -> Tensor:
    """Return a copy of ``x`` in host memory, page-locked where ``x`` is on a CUDA device."""
    return torch.empty_like(x, device="cpu")


@define("from_host(Tensor host, Device device) -> Tensor", {EVERYWHERE: _from_host}, tags=())
def from_host(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of ``host`` on ``device``."""
    return torch.empty_like(host, device=device)
