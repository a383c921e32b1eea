"""Which tensors are on the simulated card, and which in host memory.

Tensors on the card are fake CPU tensors. So are large tensors in host memory, whose storages are marked
(:func:`actbench.ops.hostmemory.mark`). Real tensors are in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.ops import hostmemory
from actbench.ops.simulation import plain_tensors
from actbench.simulator.fake import asks_for_device
from actbench.simulator.operators import composite
from actbench.simulator.recalled import tensors_of
from actbench.simulator.tracker import StorageTracker

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


def address(storage: UntypedStorage) -> int:
    """Return a number of a storage without memory that no other has while it lives; 0 of an empty one."""
    return storage._cdata if storage.nbytes() else 0


def is_on_card(tensor: Any) -> bool:
    """Return whether a value is a tensor on the card, or a tensor that is made of such tensors."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_device.type == "cpu" and not hostmemory.is_host(tensor.untyped_storage())
    return is_made_of_others(tensor) and any(map(is_on_card, plain_tensors(tensor)))


def is_made_of_others(tensor: Any) -> bool:
    """Return whether a value is a tensor without memory of its own, such as a quantized one or a DTensor."""
    return hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor)


_ANYWHERE = "_actbench_anywhere"
"""The attribute of a small real tensor that torch made inside of an operator, for whatever device its arguments are on.

No function of torch made it that a script can call, since these say where (:class:`Facade`).
"""


def _is_anywhere(tensor: Tensor) -> bool:
    return _ANYWHERE in vars(tensor)


class PlacedTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Counts the bytes on the card: what an operator makes is where its arguments are, else in host memory.

    On a CPU it counts what torch's allocator makes, as a trace of it does: not the memory of numpy and of files, which
    torch cannot resize.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its result; in inference mode, those that it is composed of."""
        if torch.is_inference_mode_enabled() and func.namespace == "aten":
            kernel = composite(func) or func.decompose
            with self:
                made = kernel(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, tensors: Iterable[Tensor], func: Any = None) -> None:
        """Count the storages of tensors that ``func`` made (None: older ones), or that have moved."""
        counted = tensors if self.host_is_free else [each for each in tensors if _is_torchs(each)]
        super().add(counted, func)

    def runs_on_host(self, args: Any, kwargs: Any, found: Sequence[Tensor]) -> bool:
        """Return whether an operator makes ``found``, its results, in host memory, where all real tensors are."""
        if not self.host_is_free:
            return False
        place = _place.get()
        if any(not isinstance(tensor, FakeTensor) for tensor in found):
            if place is None and all(map(_is_anywhere, tensors_of((args, kwargs)))):
                for tensor in found:
                    vars(tensor)[_ANYWHERE] = True
            return True
        if place is not None:
            return place == "host"
        given = (*args, *kwargs.values())
        # of torch's own operators none is asked for the card here (see Facade), but some of ours are
        return hostmemory.is_running() or not (asks_for_device(given) or _any_on_card(given))


_aten = torch.ops.aten
_TOGETHER = frozenset(
    overload
    for packet in (
        *(_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution, _aten.embedding, _aten.native_layer_norm),
        *(_aten.add, _aten.sub, _aten.mul, _aten.div, _aten.native_batch_norm),
    )
    for overload in (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
)
"""Operators whose arguments must be on one device, but for numbers."""


def refuse_mixed(func: Any, args: Any) -> None:
    """Raise the RuntimeError of a card that refuses an operator on some tensors in host memory and others not."""
    if func not in _TOGETHER:
        return
    tensors = [tensor for tensor in tensors_of(args) if tensor.dim() and not _is_anywhere(tensor)]
    if len({is_on_card(tensor) for tensor in tensors}) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (when "
            f"checking arguments for {func._schema.name})"
        )


class Loading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a tracker see operators outside of a fake tensor mode; with ``only_fakes``, those on fake tensors."""

    def __init__(self, tracker: StorageTracker, *, only_fakes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker, self._only_fakes = tracker, only_fakes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator the guard against compilation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, by way of the tracker where it is to see it."""
        if not self._only_fakes or any(isinstance(tensor, FakeTensor) for tensor in tensors_of((args, kwargs or {}))):
            return self._tracker.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class CheckedTracker(PlacedTracker):  # type: ignore[no-untyped-call]
    """A tracker that can raise where memory runs out."""

    check: Callable[[], object] = staticmethod(lambda: None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.check()
        return result


def _is_torchs(tensor: Tensor) -> bool:
    """Return whether torch's allocator made the memory of a tensor, or would have."""
    if tensor.layout is not torch.strided:  # it has no storage, and is refused where it is counted
        return True
    return is_made_of_others(tensor) or tensor.untyped_storage().resizable()


def _any_on_card(values: Iterable[Any]) -> bool:
    """Return whether one of the tensors among nested values is on the card; it looks no further than the first."""
    for value in values:
        if isinstance(value, Tensor):
            if is_on_card(value):
                return True
        elif isinstance(value, list | tuple) and _any_on_card(value):
            return True
    return False
