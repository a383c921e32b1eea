"""One tensor that several layers save is packed once.

The input of an attention block is saved by its query, key and value layers. What the first of them packs, the others
find here, for as long as autograd holds it. Neither side is kept alive: a table holds packed values weakly, and forgets
a tensor when its storage dies. Storages are known by object and not by address, since the address of a dead one is
given to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Packed = TypeVar("Packed")
Reference = Callable[[], Packed | None]
"""Gives the packed value while somebody else holds it: a ``weakref.ref``, or :class:`WeakTensors`."""

_Key = tuple[Hashable, Hashable, int]
"""Purpose, view and version."""


class SharingTable(Generic[Packed]):
    """What is packed of which tensor; one table serves a whole converted model. A copy of a table is empty."""

    def __init__(self) -> None:
        self._packed: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[_Key, Reference[Packed]]]
        self._packed = weakref.WeakKeyDictionary()

    def recall(self, source: Tensor, purpose: Hashable = None) -> Packed | None:
        """Return what was packed of this very tensor for a purpose, unchanged since, or None."""
        if source.is_inference():
            return None
        reference = self._packed.get(source.untyped_storage(), {}).get(_key(source, purpose))
        return None if reference is None else reference()

    def remember(self, source: Tensor, reference: Reference[Packed], purpose: Hashable = None) -> None:
        """Say what was packed of a tensor; the reference must not hold it alive.

        What was packed of the storage before it was changed, or has died since, is forgotten: an input buffer that is
        filled anew at every step would gather entries.
        """
        if source.is_inference():
            return
        storage = source.untyped_storage()
        kept = {key: held for key, held in self._packed.get(storage, {}).items() if _may_recall(key, held, source)}
        self._packed[storage] = kept | {_key(source, purpose): reference}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._packed.values())

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


def _may_recall(key: _Key, reference: Reference[Any], source: Tensor) -> bool:
    return key[-1] == source._version and reference() is not None


def _key(source: Tensor, purpose: Hashable) -> _Key:
    view = (source.storage_offset(), source.shape, source.stride(), source.dtype)
    return (purpose, view, source._version)


class WeakTensors:
    """Tensors that can be had again as long as somebody else holds their storages.

    What keeps a saved tensor may keep another tensor over the same storage, as checkpointing does.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._parts = [(weakref.ref(tensor.untyped_storage()), _view(tensor)) for tensor in tensors]

    def __call__(self) -> tuple[Tensor, ...] | None:
        """Return the tensors, or None when one of the storages is dead."""
        held = [(storage(), view) for storage, view in self._parts]
        live = [view(storage) for storage, view in held if storage is not None]
        return tuple(live) if len(live) == len(held) else None


def _view(tensor: Tensor) -> Callable[[torch.UntypedStorage], Tensor]:
    """Return what makes a tensor like this one over a storage, without holding this one."""
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    dtype, device = tensor.dtype, tensor.device
    mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None

    def view(storage: torch.UntypedStorage) -> Tensor:
        if mode is None:
            return torch.empty(0, dtype=dtype, device=device).set_(storage, *place)
        cached, mode.cache_enabled = mode.cache_enabled, False  # the mode's cache would hold the storage for ever
        try:
            return torch.empty(0, dtype=dtype, device=device).set_(storage, *place)
        finally:
            mode.cache_enabled = cached

    return view
