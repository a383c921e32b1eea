"""What is known of tensors that wait for the backward pass: what their parts stand for, and which are packed already.

A graph shows codes, not what they are codes of, and nothing of why a tensor was left as it is. What packs tensors says
both here, and the ledger asks. What acts without packing, such as recomputation, says so too. Nothing is noted, and
next to nothing done, while nobody listens.

One tensor that several layers save, as query, key and value do, is packed once: the others find here what the first has
packed, for as long as autograd holds it. Neither side is kept alive: a table holds packed values weakly, and forgets a
tensor when its storage dies. Storages are known by object and not by address, which the next storage may get.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True, eq=False)
class Source:
    """The shape and type of a tensor that was packed."""

    shape: torch.Size
    dtype: torch.dtype


listeners = 0
"""How many contexts of :func:`listening` are open."""

_hearers: list[Callable[[Hashable], None]] = []

_sources: weakref.WeakKeyDictionary[UntypedStorage, Source] = weakref.WeakKeyDictionary()
_reasons: weakref.WeakKeyDictionary[UntypedStorage, str] = weakref.WeakKeyDictionary()


@contextmanager
def listening(heard: Callable[[Hashable], None] | None = None) -> Iterator[None]:
    """Note what is said inside; may be entered again, and by several threads.

    ``heard`` is called with the ``by`` of everybody who acts.
    """
    global listeners
    listeners += 1
    hearers = [] if heard is None else [heard]
    _hearers.extend(hearers)
    try:
        yield
    finally:
        listeners -= 1
        for hearer in hearers:
            _hearers.remove(hearer)


def packed(x: Tensor, *parts: Tensor, by: Hashable = None) -> None:
    """Say that ``parts``, and nothing else, stand for ``x``, packed by somebody: None for the layer that runs."""
    if listeners:
        source = Source(x.shape, x.dtype)
        for part in parts:
            _sources[part.untyped_storage()] = source
        acted(by)


def acted(by: Hashable) -> None:
    """Say who has changed what the module that runs saves for backward; ``by`` as for :func:`packed`."""
    if listeners:
        for hear in tuple(_hearers):
            hear(by)


def left(x: Tensor, reason: str) -> None:
    """Say why ``x`` is left as it is; the first reason of several stays."""
    if listeners and x.layout == torch.strided:
        _reasons.setdefault(x.untyped_storage(), reason)


def source_of(storage: UntypedStorage) -> Source | None:
    """Return what the bytes of a storage were packed of, or None where nobody packed them."""
    return _sources.get(storage)


def packed_storages() -> list[UntypedStorage]:
    """Return the storages that are alive and hold what somebody packed."""
    return list(_sources)


def reason_for(storage: UntypedStorage) -> str | None:
    """Return why what lies in a storage was left alone, or None where nobody said."""
    return _reasons.get(storage)


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
        filled anew at every step would gather entries. Which are dead is asked when they have doubled, since a storage
        may have a thousand views.
        """
        if source.is_inference():
            return
        entries = self._packed.setdefault(source.untyped_storage(), {})
        if any(version != source._version for _, _, version in entries):
            entries.clear()
        if (len(entries) & (len(entries) - 1)) == 0:  # a power of two
            for key in [key for key, held in entries.items() if held() is None]:
                del entries[key]
        entries[_key(source, purpose)] = reference

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._packed.values())

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


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
