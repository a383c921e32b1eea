"""Every tensor that a step saves for backward: its graph after one training forward on fake tensors.

A storage is counted at the first entry that holds it. A tensor outside autograd's graph, such as a plain attribute of
an autograd function, is listed under the operator that made it, so that the sum always equals that of
:func:`actbench.measuring.inspection.trace`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from actbench.measuring.inspection.recorder import StorageRecorder, traced
from actbench.model.ledger import Ledger, SavedTensor, display_path
from actbench.packing import savedtensors
from actbench.packing.graphs import nodes_of
from actbench.packing.savedtensors import Source
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup

_RAW = "_raw_saved_"
_DEEPEST = 4  # most levels of nested objects to search for tensors


@dataclass(frozen=True)
class Argument:
    """What a node saves under one name: a tensor, or the tensors that a pack hook returned instead, if any."""

    name: str
    tensors: tuple[Tensor, ...]


def arguments_of(node: Node) -> Iterator[Argument]:
    """Yield what a node saves, built in or by ``save_for_backward``; unpack hooks do not run."""
    for attribute in dir(node):
        if not attribute.startswith(_RAW):
            continue
        name, saved = attribute.removeprefix(_RAW), getattr(node, attribute)
        if not isinstance(saved, tuple | list):
            yield from _argument(name, saved)
            continue
        name = "saved_tensors" if hasattr(type(node), "saved_tensors") else name  # the name in autograd functions
        for place, item in enumerate(saved):
            yield from _argument(f"{name}[{place}]", item)


def _argument(name: str, saved: Any) -> Iterator[Argument]:
    if saved.data is not None:
        yield Argument(name, tuple(tensors_in(saved.data)))


def tensors_in(kept: Any, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """Yield the strided tensors in the result of a pack hook: a tensor, nested tensors, or an object with tensors."""
    for leaf in tree_leaves(kept):
        if isinstance(leaf, Tensor):
            if leaf.layout == torch.strided:
                yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type) and not callable(leaf):
            yield from tensors_in(list(vars(leaf).values()), depth - 1)


_OUTSIDE_OF_THE_GRAPH = "held outside of autograd's graph"


@dataclass(frozen=True, eq=False)
class _Entry:
    """A saved tensor before it is counted.

    Attributes:
        storages: The storages of the tensor, or of what is saved in its place.
        packed: Whether something is saved in its place.
        reason: Why it is saved as it is, if only the entry knows.
    """

    module: str
    operator: str
    argument: str
    shape: torch.Size
    dtype: torch.dtype
    storages: tuple[UntypedStorage, ...]
    packed: bool = False
    reason: str | None = None

    @property
    def place(self) -> str:
        """Its module, operator and argument, for entries that share a storage with it."""
        return f"{display_path(self.module)} {self.operator} {self.argument}".rstrip()


def itemize(setup: TrainingSetup, make_batch: Callable[[], Batch]) -> Ledger:
    """Run one training forward of a setup on fake tensors, and list what it saves; see :func:`traced`."""
    with savedtensors.observing(), traced(setup, make_batch) as (recorder, loss):
        nodes = nodes_of(loss)
        held = [item for node in nodes for item in _merged(_entries_of(node, recorder))]
        held += _outside(recorder, {storage for item in held for storage in item.storages}, loss)
        recomputed = sum(not argument.tensors for node in nodes for argument in arguments_of(node))
        return Ledger(entries=tuple(_entries(held, recorder)), recomputed=recomputed)


def _entries_of(node: Node, recorder: StorageRecorder) -> Iterator[tuple[_Entry, Source | None]]:
    """Yield what a node saves, and from which tensor it was packed; numbers, which no operator sees, are left out."""
    module = recorder.maker_of(node)
    for argument in arguments_of(node):
        found = {t.untyped_storage(): t for t in argument.tensors if t.dim() or recorder.saw(t.untyped_storage())}
        sources = dict.fromkeys(savedtensors.source_of(storage) for storage in found)
        for source in [source for source in sources if source is not None] or sources:
            storages = tuple(storage for storage in found if savedtensors.source_of(storage) is source)
            shown = found[storages[0]] if source is None else source
            is_packed = source is not None
            yield _Entry(module, node.name(), argument.name, shown.shape, shown.dtype, storages, is_packed), source


def _merged(found: Iterator[tuple[_Entry, Source | None]]) -> Iterator[_Entry]:
    """Merge the entries of a node that are parts of one packed tensor."""
    merged: dict[object, _Entry] = {}
    for item, source in found:
        key = source or item
        first = merged.get(key)
        if first is not None:
            storages = tuple(dict.fromkeys((*first.storages, *item.storages)))
            item = replace(first, argument=f"{first.argument}, {item.argument}", storages=storages)
        merged[key] = item
    yield from merged.values()


def _outside(recorder: StorageRecorder, found: set[UntypedStorage], loss: Tensor) -> Iterator[_Entry]:
    """Yield the storages that are alive and not in the graph."""
    for storage, origin in recorder.made():
        if storage not in found:
            source = savedtensors.source_of(storage)
            shown, is_packed = source or origin, source is not None
            told = None if is_packed else savedtensors.reason_for(storage)
            reason = "the loss itself" if storage is loss.untyped_storage() else told or _OUTSIDE_OF_THE_GRAPH
            yield _Entry(origin.maker, origin.operator, "", shown.shape, shown.dtype, (storage,), is_packed, reason)


def _entries(held: Sequence[_Entry], recorder: StorageRecorder) -> Iterator[SavedTensor]:
    holders: dict[UntypedStorage, list[_Entry]] = defaultdict(list)
    for item in held:
        for storage in item.storages:
            holders[storage].append(item)
    for item in held:
        counted = [
            storage
            for storage in item.storages
            if holders[storage][0] is item and recorder.known_as(storage) is None and not recorder.is_on_host(storage)
        ]
        others = (other.place for storage in item.storages for other in holders[storage] if other is not item)
        known = recorder.known_as(item.storages[0])
        yield SavedTensor(
            module=item.module,
            operator=item.operator,
            argument=item.argument,
            shape=tuple(item.shape),
            dtype=str(item.dtype).removeprefix("torch."),
            bits=_bits(item),
            kept_bytes=sum(storage.nbytes() for storage in counted),
            packed=item.packed,
            shared_with=tuple(dict.fromkeys(others)) if known is None else (),
            reason=known or _reason(item, recorder),
        )


def _reason(item: _Entry, recorder: StorageRecorder) -> str | None:
    if all(map(recorder.is_on_host, item.storages)):
        return "in host memory"
    if item.packed:  # outer hooks leave its packed parts alone, and their reason is not about the tensor
        return item.reason
    return item.reason or savedtensors.reason_for(item.storages[0])


def _bits(item: _Entry) -> float:
    elements = item.shape.numel()
    if not item.packed or not elements:
        return 8.0 * item.dtype.itemsize
    return 8 * sum(storage.nbytes() for storage in item.storages) / elements
