"""Moving saved tensors to host memory and back, as operators, so that a meter on fake tensors sees bytes leave.

``to_host(x)`` copies to page-locked memory where there is a CUDA device to lock it for; ``from_host(host, device)``
brings it back. Both run on the current stream without waiting for it: torch's allocators, of device and of page-locked
memory, reuse a block only after what was queued on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actbench import hostmemory
from actbench.ops.library import EVERYWHERE, define


def _to_host(x: Tensor) -> Tensor:
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
    hostmemory.mark(host.untyped_storage())
    return host


def _fake_to_host(x: Tensor) -> Tensor:
    host = torch.empty_like(x, device="cpu")
    hostmemory.mark(host.untyped_storage())
    return host


def _from_host(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


def _fake_from_host(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device)


define("to_host(Tensor x) -> Tensor", {EVERYWHERE: _to_host}, _fake_to_host, tags=())
define("from_host(Tensor host, Device device) -> Tensor", {EVERYWHERE: _from_host}, _fake_from_host, tags=())


def to_host(x: Tensor) -> Tensor:
    """Return a copy of ``x`` in host memory, of the same shape and type, marked in :mod:`actbench.hostmemory`."""
    host: Tensor = torch.ops.actbench.to_host.default(x)
    return host


def from_host(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of ``host`` on ``device``."""
    back: Tensor = torch.ops.actbench.from_host.default(host, device)
    return back
