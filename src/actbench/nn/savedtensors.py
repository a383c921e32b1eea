"""What a tensor that waits for the backward pass stands for.

A graph shows codes, not what they are codes of, and nothing of why a tensor was left as it is. What packs tensors
says both here, and the ledger asks. What acts without packing, such as recomputation, says so too. Nothing is noted,
and next to nothing done, while nobody listens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage


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


def reason_for(storage: UntypedStorage) -> str | None:
    """Return why what lies in a storage was left alone, or None where nobody said."""
    return _reasons.get(storage)
