"""Records which tensors the packed parts stand for, and which tensors are packed already.

A graph shows codes, but not what they encode, nor why a tensor was not packed. Packing code records both here, and the
ledger reads it. Code that acts without packing, such as recomputation, records that too. Without an observer nothing
is recorded and next to no time is spent.

A tensor that several layers save, such as the input of query, key and value, is packed once: the other layers find the
packed parts here as long as autograd holds them. Neither the tensor nor the parts are kept alive: a table holds packed
values weakly, and forgets a tensor when its storage is freed. Storages are identified by object, not by address, which
the next storage may get.
"""

from __future__ import annotations

import threading
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
    """A tensor that was packed: its shape, its type, and the bytes of its parts in closed form, if there is one."""

    shape: torch.Size
    dtype: torch.dtype
    packed_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class _Observer:
    """What is called with the actor of each action, if anything, and the thread that observes."""

    notify: Callable[[Hashable], None] | None
    thread: int

    @property
    def is_concerned(self) -> bool:
        """Whether this thread is the observer's, or one of autograd's, which runs backward passes for others."""
        return self.thread == threading.get_ident() or torch._C._current_graph_task_id() != -1


observers: tuple[_Observer, ...] = ()
"""The open contexts of :func:`observing`. The tuple is replaced, never changed: threads read it without a lock."""

_changing = threading.Lock()

Value = TypeVar("Value")


class ByStorage(Generic[Value]):
    """Values of storages, as long as these live.

    A storage is known by the address of its object in torch, which a later one may get: so it is held weakly, and
    compared. A lookup takes a third of that of ``WeakKeyDictionary``, which hashes weak references. A copy is empty.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.KeyedRef[int, UntypedStorage], Value]] = {}

        # a strong reference would be a cycle, and keep the table until the collector runs
        table = weakref.ref(self)

        def forget(reference: Any) -> None:
            entries = getattr(table(), "_entries", {})
            # another storage may have got the address, and the entry, meanwhile
            if entries.get(reference.key, (None,))[0] is reference:
                del entries[reference.key]

        self._forget = forget

    def get(self, storage: UntypedStorage) -> Value | None:
        """Return the value of a storage, or None."""
        found = self._entries.get(storage._cdata)
        return found[1] if found is not None and found[0]() is storage else None

    def put(self, storage: UntypedStorage, value: Value) -> None:
        """Set the value of a storage."""
        key = storage._cdata
        self._entries[key] = weakref.KeyedRef(storage, self._forget, key), value

    def values(self) -> Iterator[Value]:
        """Yield the values."""
        return (value for _, value in list(self._entries.values()))

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


_sources: weakref.WeakKeyDictionary[UntypedStorage, Source] = weakref.WeakKeyDictionary()
_reasons: weakref.WeakKeyDictionary[UntypedStorage, str] = weakref.WeakKeyDictionary()


@contextmanager
def observing(notify: Callable[[Hashable], None] | None = None) -> Iterator[None]:
    """Record inside the context what is packed, left and done; several threads may enter, also nested.

    ``notify`` is called with the actor of each action of this thread, and of backward passes.
    """
    global observers
    observer = _Observer(notify, threading.get_ident())
    with _changing:
        observers = (*observers, observer)
    try:
        yield
    finally:
        with _changing:
            observers = tuple(each for each in observers if each is not observer)


def packed(x: Tensor, *parts: Tensor, by: Hashable = None, closed_form: Callable[[], int] | None = None) -> None:
    """Mark ``parts`` as packed from ``x``; ``by`` is who packed it, None for the layer that runs.

    ``closed_form`` returns the bytes that all parts should have.
    """
    if observers:
        source = Source(x.shape, x.dtype, None if closed_form is None else closed_form())
        for part in parts:
            _sources[part.untyped_storage()] = source
        acted(by)


def acted(by: Hashable) -> None:
    """Record that ``by`` changed what the running module saves for backward; ``by`` as for :func:`packed`."""
    for observer in observers:
        if observer.notify is not None and observer.is_concerned:
            observer.notify(by)


def left(x: Tensor, reason: str) -> None:
    """Record why ``x`` is not packed; of several reasons the first stays."""
    # sparse tensors have no storage to ask for
    if observers and x.layout == torch.strided:
        _reasons.setdefault(x.untyped_storage(), reason)


def source_of(storage: UntypedStorage) -> Source | None:
    """Return the source that a storage was packed from, or None if it holds no packed parts."""
    return _sources.get(storage)


def packed_storages() -> list[UntypedStorage]:
    """Return the live storages that hold packed parts."""
    return list(_sources)


def reason_for(storage: UntypedStorage) -> str | None:
    """Return why the tensor in a storage was not packed, or None if no reason was recorded."""
    return _reasons.get(storage)


Packed = TypeVar("Packed")
Reference = Callable[[], Packed | None]
"""Returns the packed value while others hold it: a ``weakref.ref``, or :class:`WeakTensors`."""

_Key = tuple[Hashable, Hashable, int]
"""Purpose, view and version."""


class SharingTable(Generic[Packed]):
    """Maps tensors to their packed values; one table serves a whole converted model. A copy of a table is empty."""

    def __init__(self) -> None:
        self._packed: ByStorage[dict[_Key, Reference[Packed]]] = ByStorage()

    def recall(self, source: Tensor, purpose: Hashable = None) -> Packed | None:
        """Return the packed value of this tensor for a purpose, if the tensor is unchanged, else None."""
        entries = self._packed.get(source.untyped_storage())
        # inference tensors have no version counter
        if entries is None or source.is_inference():
            return None
        reference = entries.get(_key(source, purpose))
        return None if reference is None else reference()

    def remember(self, source: Tensor, reference: Reference[Packed], purpose: Hashable = None) -> None:
        """Record the packed value of a tensor; the reference must not keep it alive.

        Entries from before a change of the storage, and dead entries, are removed: else a reused input buffer would
        collect entries at every step. Dead entries are searched when the entries have doubled, since a storage may have
        a thousand views.
        """
        if source.is_inference():
            return
        storage, key = source.untyped_storage(), _key(source, purpose)
        entries = self._packed.get(storage)
        if entries is None:
            self._packed.put(storage, {key: reference})
            return
        if any(version != source._version for _, _, version in entries):
            entries.clear()
        if (len(entries) & (len(entries) - 1)) == 0:  # a power of two
            for dead in [key for key, held in entries.items() if held() is None]:
                del entries[dead]
        entries[key] = reference

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._packed.values())

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


def _key(source: Tensor, purpose: Hashable) -> _Key:
    view = (source.storage_offset(), source.shape, source.stride(), source.dtype)
    return (purpose, view, source._version)


class WeakTensors:
    """Tensors that can be made again as long as others hold their storages.

    Whoever holds a saved tensor may hold another tensor over the same storage, as checkpointing does.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._parts = [(weakref.ref(tensor.untyped_storage()), _form(tensor)) for tensor in tensors]

    def __call__(self) -> tuple[Tensor, ...] | None:
        """Return the tensors, or None if one of the storages is freed."""
        held = [(storage(), form) for storage, form in self._parts]
        live = [_over(storage, *form) for storage, form in held if storage is not None]
        return tuple(live) if len(live) == len(held) else None


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a tensor over the same storage is made by, without a reference to this one."""
    place, dtype = (tensor.storage_offset(), tensor.shape, tensor.stride()), tensor.dtype
    if isinstance(tensor, FakeTensor):  # to a script on a simulated card it says another device than its own
        return place, dtype, tensor.fake_device, tensor.fake_mode
    return place, dtype, tensor.device, None


def _over(storage: UntypedStorage, place: Any, dtype: torch.dtype, device: torch.device, mode: Any) -> Tensor:
    if mode is None:
        return torch.empty(0, dtype=dtype, device=device).set_(storage, *place)
    with torch._C._DisableTorchDispatch():  # the mode's cache would never free the storage
        bare = torch.empty(0, dtype=dtype, device="meta").set_(storage, *place)
    return FakeTensor(mode, bare, device)
