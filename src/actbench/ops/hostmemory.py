"""Moving saved tensors to host memory and back, and which storages stand for host memory.

Both moves are operators, so that a meter on fake tensors sees bytes leave. They run on the current stream without
waiting for it: torch's allocators reuse a block only after what was queued on it. The simulated meter runs on fake cpu
tensors, where a device says nothing about where bytes lie. What moves bytes to host memory therefore marks the storage
it moved them to, and what counts device bytes asks here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.ops.library import EVERYWHERE, define

_is_the_device: ContextVar[bool] = ContextVar("_is_the_device", default=False)
_is_running: ContextVar[bool] = ContextVar("_is_running", default=False)
_marked: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def mark(storage: torch.UntypedStorage) -> None:
    """Say that ``storage`` lies in host memory; forgotten when the storage dies."""
    _marked.add(storage)


def marked_bytes() -> int:
    """Return the bytes of all real storages that are marked."""
    return sum(storage.nbytes() for storage in list(_marked) if storage.device.type != "meta")


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
    """Return whether fake cpu tensors stand for tensors of the host, and not for those of some device."""
    return _is_the_device.get()


def is_elsewhere(x: Tensor) -> bool:
    """Return whether host memory is another memory than that of a tensor; a fake one stands for the meter's device."""
    return x.device.type != "cpu" or (isinstance(x, FakeTensor) and not is_the_device())


@contextmanager
def running_on_host() -> Iterator[None]:
    """Say that what operators make inside lies in host memory, also what fake tensors stand for."""
    token = _is_running.set(True)
    try:
        yield
    finally:
        _is_running.reset(token)


def is_running() -> bool:
    """Return whether operators run on the host now; see :func:`running_on_host`."""
    return _is_running.get()


def _to_host(x: Tensor) -> Tensor:
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
    mark(host.untyped_storage())
    return host


def _from_host(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


@define("to_host(Tensor x) -> Tensor", {EVERYWHERE: _to_host}, tags=())
def to_host(x: Tensor) -> Tensor:
    """Return a marked copy of ``x`` in host memory, page-locked where ``x`` is on a CUDA device."""
    host = torch.empty_like(x, device="cpu")
    mark(host.untyped_storage())
    return host


@define("from_host(Tensor host, Device device) -> Tensor", {EVERYWHERE: _from_host}, tags=())
def from_host(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of ``host`` on ``device``."""
    return torch.empty_like(host, device=device)
