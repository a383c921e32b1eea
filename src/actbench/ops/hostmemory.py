"""Moves saved tensors to host memory and back, and marks storages that are in host memory.

Both moves are operators, so that a meter on fake tensors sees bytes leave. They run on the current stream and do not
wait: torch's allocators reuse a block only after the work queued on it. The simulated meter runs on fake cpu tensors,
whose device does not say where bytes are. So a move to host memory marks its target storage, and a meter that counts
device bytes asks :func:`is_host`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.ops.library import EVERYWHERE, define

_is_the_device: ContextVar[bool] = ContextVar("_is_the_device", default=False)
_is_running: ContextVar[bool] = ContextVar("_is_running", default=False)
_marked: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def mark(storage: torch.UntypedStorage) -> None:
    """Mark ``storage`` as host memory until it is freed."""
    _marked.add(storage)


def marked_bytes() -> int:
    """Return the bytes of all marked storages that are real."""
    return sum(storage.nbytes() for storage in list(_marked) if storage.device.type != "meta")


def is_host(storage: torch.UntypedStorage) -> bool:
    """Return whether ``storage`` is marked as host memory."""
    return storage in _marked


@contextmanager
def _inside(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def as_the_device() -> AbstractContextManager[None]:
    """Inside, fake cpu tensors stand for tensors of the host itself: no move to host memory changes their place."""
    return _inside(_is_the_device)


def is_the_device() -> bool:
    """Return whether fake cpu tensors stand for tensors of the host; see :func:`as_the_device`."""
    return _is_the_device.get()


def is_elsewhere(x: Tensor) -> bool:
    """Return whether a tensor is outside host memory; a fake one is on the meter's device."""
    return x.device.type != "cpu" or (isinstance(x, FakeTensor) and not is_the_device())


def running_on_host() -> AbstractContextManager[None]:
    """Inside, the results of operators are in host memory, those on fake tensors too."""
    return _inside(_is_running)


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
