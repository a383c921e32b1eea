"""Kept tensors on their way to host memory and back: what is held of them meanwhile, and what is fetched when.

One tensor that leaves is held until the next leaves, and one that comes back is fetched ahead, unless that is switched
off. So it is on every device, and on fake tensors, so that a meter sees what it costs.
"""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench import hostmemory
from actbench.nn.keeping.copies import AtOnce, Copied, Copies, OnTheSide, Tensors
from actbench.nn.sharing import WeakTensors


class _Ahead(NamedTuple):
    """A tensor that was fetched before it was asked for, and the storage of its first part in host memory."""

    storage: weakref.ref[torch.UntypedStorage]
    copied: Copied


class _Leaving(NamedTuple):
    """Tensors that are being copied to host memory, and their versions when that began."""

    parts: Tensors
    versions: list[int | None]
    copied: Copied


class Lane:
    """Tensors that leave one device and come back, the last first as a rule.

    When a tensor comes back, the one that left just before it is fetched too, as the next that will be asked for; which
    one that is autograd does not say, so this is a guess that costs one tensor more on the device. When the host copy
    of what was fetched dies, so does what was fetched.

    Args:
        copies: Who copies.
        prefetch: Whether a tensor is fetched ahead.
    """

    def __init__(self, copies: Copies, prefetch: bool = True) -> None:
        self._copies, self._prefetch = copies, prefetch
        self._leaving: _Leaving | None = None
        self._torn: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._before: weakref.WeakKeyDictionary[torch.UntypedStorage, WeakTensors] = weakref.WeakKeyDictionary()
        self._last: WeakTensors | None = None
        self._ahead: _Ahead | None = None

    def away(self, parts: Tensors) -> Tensors:
        """Return copies of parts in host memory, where they are by the time that :meth:`back` needs them."""
        self.settle()
        copied = self._copies.away(parts)
        self._leaving = _Leaving(parts, _versions(parts), copied)
        if self._last is not None:
            self._before[copied.tensors[0].untyped_storage()] = self._last
        self._last = WeakTensors(*copied.tensors)
        return copied.tensors

    def back(self, parts: Tensors) -> Tensors:
        """Return what :meth:`away` was given, for the current stream, from what it returned.

        Raises:
            RuntimeError: It was changed in place while it was being copied.
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
        """Let go of what is leaving, and note whether it was changed meanwhile: the copy may then have read either."""
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
        """Fetch what left before the tensor of this storage, unless it is gone or was fetched."""
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
    """Drop what a lane fetched ahead, if it was fetched from the storage that has just died."""
    live = lane()
    if live is not None and live._ahead is not None and live._ahead.storage is storage:
        live._drop_ahead()


class Transfer:
    """Moves kept tensors to host memory and back, each device's in a lane of its own.

    Args:
        prefetch: Whether a tensor is fetched ahead.

    Attributes:
        prefetch: As given. A copy has it, and moves tensors of its own.
    """

    def __init__(self, prefetch: bool = True) -> None:
        self.prefetch = prefetch
        self._lanes: dict[torch.device, Lane] = {}

    def __reduce__(self) -> tuple[type[Transfer], tuple[bool]]:
        return Transfer, (self.prefetch,)

    def away(self, parts: Tensors) -> Tensors:
        """Return copies of one or more tensors in host memory, to be read by nobody but :meth:`back`."""
        device = parts[0].device
        if device not in self._lanes:
            copies: Copies = OnTheSide(device) if device.type == "cuda" else AtOnce(device)
            self._lanes[device] = Lane(copies, self.prefetch)
        return self._lanes[device].away(parts)

    def back(self, parts: Tensors, device: torch.device) -> Tensors:
        """Return what was given to :meth:`away` on that device, from what it returned.

        Raises:
            RuntimeError: It was changed in place while it was being copied.
        """
        return self._lanes[device].back(parts)

    def settle(self) -> None:
        """Let go of what is leaving; after a forward pass, nothing of what was moved is on a device then."""
        for lane in tuple(self._lanes.values()):
            lane.settle()


def is_elsewhere(x: Tensor) -> bool:
    """Return whether host memory is another memory than that of a tensor; a fake one stands for the meter's device."""
    return x.device.type != "cpu" or (isinstance(x, FakeTensor) and not hostmemory.is_the_device())
