"""Which tensors are on the simulated card, and which in host memory.

Tensors on the card are fake CPU tensors. So are large tensors in host memory, whose storages are marked
(:func:`actbench.ops.hostmemory.mark`). Real tensors are in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.measuring.meters.tracker import StorageTracker
from actbench.ops import hostmemory
from actbench.ops.simulation import plain_tensors
from actbench.workloads.recalled import tensors_of

Place = Literal["card", "host"]

_place: ContextVar[Place | None] = ContextVar("_place", default=None)


@contextmanager
def placing(place: Place) -> Iterator[None]:
    """Inside the block, operators make their results at ``place``, wherever their arguments are."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def is_on_card(tensor: Any) -> bool:
    """Return whether a value is a tensor on the card, or a tensor that is made of such tensors."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_device.type == "cpu" and not hostmemory.is_host(tensor.untyped_storage())
    return is_made_of_others(tensor) and any(map(is_on_card, plain_tensors(tensor)))


def is_made_of_others(tensor: Any) -> bool:
    """Return whether a value is a tensor without memory of its own, such as a quantized one or a DTensor."""
    return hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor)


class PlacedTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Counts the bytes on the card: what an operator makes is where its arguments are, else in host memory."""

    def runs_on_host(self, args: Any, kwargs: Any, found: Sequence[Tensor]) -> bool:
        """Return whether an operator makes ``found``, its results, in host memory, where all real tensors are."""
        if not self.host_is_free:
            return False
        if any(not isinstance(tensor, FakeTensor) for tensor in found):
            return True
        place = _place.get()
        if place is not None:
            return place == "host"
        return hostmemory.is_running() or not (_any_on_card(args) or _any_on_card(kwargs.values()))


class OnlyFakes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a tracker see the operators on fake tensors only."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator the guard against compilation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, by way of the tracker if one of its arguments is fake."""
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_of((args, kwargs or {}))):
            return self._tracker.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _any_on_card(values: Iterable[Any]) -> bool:
    """Return whether one of the tensors among nested values is on the card; it looks no further than the first."""
    for value in values:
        if isinstance(value, Tensor):
            if is_on_card(value):
                return True
        elif isinstance(value, list | tuple) and _any_on_card(value):
            return True
    return False
