"""What the loaders of a script would still give when its run ends: larger batches, and those of an evaluation.

A run that ends after two equal steps sees the first batches alone. The batches that follow are made for a short while
and weighed; of loaders that nothing was taken of, and of a ``Trainer``, only the number of rows is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from actbench.model.records import Built
from actbench.tools.script.arrivals import changed, on_arrival

_SCANNED_ALIKE, _SCANNED = 64, 100_000
"""Over how many batches of one size, and over how many in all a loader's largest batch is looked for."""

_SECONDS = 2.0
_MORE = 1.1
"""How many times as large a batch has to be to be told."""


class Scan(NamedTuple):
    """Batches of a loader, as its sampler gives them.

    Attributes:
        batches: What the loader makes its batches of: indices of samples.
        sizes: The bytes of each batch; empty for a data set that can only be iterated, of which nothing is read ahead.
        is_cut: Whether time ended before the batches did.
    """

    batches: list[Any]
    sizes: list[int]
    is_cut: bool = False


def scan(batches: Iterator[Any], load: Callable[[Any], Any], seconds: float) -> Scan:
    """Take batches, and weigh them, until there are no more, all are alike or time ends."""
    found, until = Scan([], []), time.monotonic() + seconds
    for batch in islice(batches, _SCANNED):
        found.batches.append(batch)
        if batch is None or (isinstance(batch, list) and batch[:1] == [None]):
            return Scan(found.batches, [])
        found.sizes.append(_bytes(load(batch)))
        if len(found.sizes) == _SCANNED_ALIKE and len(set(found.sizes)) == 1:
            break
        if time.monotonic() > until:
            return found._replace(is_cut=True)
    return found


class Ahead:
    """Follows the loaders of a script."""

    def __init__(self) -> None:
        self._waiting: WeakSet[DataLoader[Any]] = WeakSet()
        self._trainers: WeakSet[Any] = WeakSet()
        self._given: list[Any] = []
        self._left: Iterator[Any] = iter(())
        self._load: Callable[[Any], Any] = lambda index: index

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Note the loaders that are made inside the block."""

        def trainers(module: ModuleType) -> AbstractContextManager[None]:
            return changed(module.Trainer, "__init__", _adding(self._trainers))

        with (
            changed(DataLoader, "__init__", _adding(self._waiting)),
            on_arrival({"transformers.trainer": trainers}, {}, lambda package: None),
        ):
            yield

    def ordered(self, loader: DataLoader[Any], batches: Iterator[Any], load: Callable[[Any], Any]) -> Iterator[Any]:
        """Return the batches of an epoch; of one that trains, what is given is noted."""
        self._waiting.discard(loader)
        if not torch.is_grad_enabled():
            return batches
        self._given, self._left, self._load = [], batches, load
        return self._giving(batches, self._given)

    def _giving(self, batches: Iterator[Any], given: list[Any]) -> Iterator[Any]:
        for batch in batches:
            given.append(batch)
            yield batch

    def told(self, built: Built) -> Built:
        """Return what is known of a run with what its loaders would still give."""
        more: dict[str, Any] = {}
        with suppress(Exception):  # of a data set that cannot be read twice: nothing is known
            given = scan(iter(self._given), self._load, _SECONDS).sizes
            later = scan(self._left, self._load, _SECONDS).sizes
            if given and later and max(later) > _MORE * max(given):
                more["larger_batches"] = max(later) / max(given)
        rows = [loader.batch_size or 0 for loader in self._waiting]
        for trainer in self._trainers:
            if trainer.args.eval_strategy != "no" and trainer.eval_dataset is not None:
                rows.append(trainer.args.eval_batch_size)
        if built.batch_size is not None and max(rows, default=0) > built.batch_size:
            more["waiting_rows"] = max(rows)
        return built.model_copy(update=more)


def _adding(made: WeakSet[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def change(own: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            made.add(self)

        return init

    return change


def _bytes(value: Any) -> int:
    """Return the bytes of the tensors in a batch."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return sum(map(_bytes, vars(value).values())) if hasattr(value, "__dict__") else 0
