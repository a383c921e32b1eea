"""Moves parts of saved tensors to host memory and back.

A tensor that leaves is held until the next leaves, and the next to come back is fetched ahead, unless ``prefetch`` is
off. This is so on every device, and on fake tensors, so that a meter sees what it costs.

On CUDA copies run on a separate stream, beside the computation. No block of memory is freed while a copy is pending: a
leaving tensor is held until its copy was waited for, and a returning tensor is allocated on the stream that needs it.
So the computing stream has waited for either copy before it can reuse the block. Hence the bytes held do not depend on
how far the host has run ahead, as they would with ``Tensor.record_stream``. Host memory is page-locked, from torch's
pool of such blocks. On other devices, and on fake tensors, copies are made at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from actbench.ops.hostmemory import from_host, to_host
from actbench.packing.savedtensors import WeakTensors

Tensors = tuple[Tensor, ...]


class Copied(NamedTuple):
    """The targets of a copy, and a function that makes the asking stream wait for the copy."""

    tensors: Tensors
    settle: Callable[[], None]


class AtOnce:
    """Copies between a device and host memory at once, when asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def away(self, tensors: Tensors) -> Copied:
        """Copy to host memory."""
        return Copied(tuple(map(to_host, tensors)), _nothing)

    def back(self, tensors: Tensors) -> Copied:
        """Copy to the device."""
        return Copied(tuple(from_host(tensor, self._device) for tensor in tensors), _nothing)


class OnTheSide:
    """Copies on a separate CUDA stream, behind the work queued on the current stream at the call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def away(self, tensors: Tensors) -> Copied:
        """Queue copies to page-locked memory."""
        return self._queued(lambda: tuple(map(to_host, tensors)))

    def back(self, tensors: Tensors) -> Copied:
        """Queue copies to blocks that are allocated on the current stream."""
        # allocated on the stream that needs them, to whose pool of blocks they go back
        blocks = [torch.empty_like(tensor, device=self._device) for tensor in tensors]
        pairs = tuple(zip(blocks, tensors, strict=True))
        return self._queued(lambda: tuple(block.copy_(held, non_blocking=True) for block, held in pairs))

    def _queued(self, copy: Callable[[], Tensors]) -> Copied:
        computing = torch.cuda.current_stream(self._device)
        # what is copied may still be computed
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            tensors = copy()
        copied = self._stream.record_event()
        return Copied(tensors, lambda: _wait(copied, computing, tensors))


def _wait(copied: torch.cuda.Event, computing: torch.cuda.Stream, tensors: Tensors) -> None:
    """Make the stream that asked for a copy wait for it, and the current stream too, if it is another."""
    computing.wait_event(copied)
    for tensor in tensors:
        current = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else computing
        # a backward pass may run on another stream than its forward pass
        if current != computing:
            current.wait_event(copied)
            # the allocator must not reuse the block before that stream has come past it
            tensor.record_stream(current)


def _nothing() -> None:
    """Wait for nothing: the copy was made at once."""


class _Ahead(NamedTuple):
    """A tensor that was fetched ahead, and the storage of its first part in host memory."""

    storage: weakref.ref[torch.UntypedStorage]
    copied: Copied


class _Leaving(NamedTuple):
    """Tensors that are being copied to host memory, and their versions at the start of the copy."""

    parts: Tensors
    versions: list[int | None]
    copied: Copied


class Lane:
    """Tensors that leave one device and come back, usually the last first.

    When a tensor comes back, the one that left just before it is fetched too, unless ``prefetch`` is off: autograd does
    not say what it needs next, so this is a guess that costs one more tensor on the device. When the host copy of a
    fetched tensor is freed, the fetched tensor is freed too.
    """

    def __init__(self, copies: AtOnce | OnTheSide, prefetch: bool = True) -> None:
        self._copies, self._prefetch = copies, prefetch
        self._leaving: _Leaving | None = None
        self._torn: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._before: weakref.WeakKeyDictionary[torch.UntypedStorage, WeakTensors] = weakref.WeakKeyDictionary()
        self._last: WeakTensors | None = None
        self._ahead: _Ahead | None = None

    def away(self, parts: Tensors) -> Tensors:
        """Return copies of parts in host memory; they are complete when :meth:`back` needs them."""
        self.settle()
        copied = self._copies.away(parts)
        self._leaving = _Leaving(parts, _versions(parts), copied)
        if self._last is not None:
            self._before[copied.tensors[0].untyped_storage()] = self._last
        self._last = WeakTensors(*copied.tensors)
        return copied.tensors

    def back(self, parts: Tensors) -> Tensors:
        """Return the parts that :meth:`away` took, for the current stream, from the copies that it returned.

        Raises:
            RuntimeError: A part was changed in place while it was being copied.
        """
        self.settle()
        if parts[0].untyped_storage() in self._torn:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation while "
                "it was on its way to host memory"
            )
        copied = self._taken(parts[0].untyped_storage()) or self._copies.back(parts)
        copied.settle()
        if self._prefetch:
            self._fetch_before(parts[0].untyped_storage())
        return copied.tensors

    def settle(self) -> None:
        """Release the leaving parts, and note whether they were changed meanwhile: the copy may then be mixed."""
        if self._leaving is not None:
            parts, versions, copied = self._leaving
            copied.settle()
            if _versions(parts) != versions:
                self._torn.add(copied.tensors[0].untyped_storage())
            self._leaving = None

    def _taken(self, storage: torch.UntypedStorage) -> Copied | None:
        if self._ahead is None or self._ahead.storage() is not storage:
            return None
        copied, self._ahead = self._ahead.copied, None
        return copied

    def _fetch_before(self, storage: torch.UntypedStorage) -> None:
        """Fetch the parts that left before this storage, unless they are freed or fetched already."""
        reference = self._before.get(storage)
        before = None if reference is None else reference()
        if before is None or (self._ahead is not None and self._ahead.storage() is before[0].untyped_storage()):
            return
        self._drop_ahead()
        died = functools.partial(_drop_ahead_of, weakref.ref(self))
        self._ahead = _Ahead(weakref.ref(before[0].untyped_storage(), died), self._copies.back(before))

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.copied.settle()
            self._ahead = None


def _versions(parts: Tensors) -> list[int | None]:
    return [None if part.is_inference() else part._version for part in parts]


def _drop_ahead_of(lane: weakref.ref[Lane], storage: weakref.ref[torch.UntypedStorage]) -> None:
    """Drop the tensor that a lane fetched ahead, if it came from the storage that was just freed."""
    live = lane()
    if live is not None and live._ahead is not None and live._ahead.storage is storage:
        live._drop_ahead()


class HostOffload:
    """Moves parts to host memory and back, with one lane for each device; a copy of this starts empty."""

    def __init__(self, prefetch: bool = True) -> None:
        self.prefetch = prefetch
        self._lanes: dict[torch.device, Lane] = {}

    def __reduce__(self) -> tuple[type[HostOffload], tuple[bool]]:
        return HostOffload, (self.prefetch,)

    def away(self, parts: Tensors) -> Tensors:
        """Return copies of one or more tensors in host memory, which only :meth:`back` may read."""
        device = parts[0].device
        if device not in self._lanes:
            copies = OnTheSide(device) if device.type == "cuda" else AtOnce(device)
            self._lanes[device] = Lane(copies, self.prefetch)
        return self._lanes[device].away(parts)

    def back(self, parts: Tensors, device: torch.device) -> Tensors:
        """Return the tensors that :meth:`away` took on that device, from the copies that it returned.

        Raises:
            RuntimeError: A tensor was changed in place while it was being copied.
        """
        return self._lanes[device].back(parts)

    def settle(self) -> None:
        """Release the leaving tensors: after a forward pass, no moved tensor is left on a device."""
        for lane in tuple(self._lanes.values()):
            lane.settle()
