"""What the loaders of a script would still give when its run ends: larger batches, and those of an evaluation.

A run that ends after two equal steps sees the first batches alone. The batches that follow are made for a short while
and weighed; of loaders that nothing was taken of, and of a ``Trainer``, only the number of rows is read.
"""

from __future__ import annotations

import math
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
from actbench.tools.script.libraries.importpatches import changed, patch_on_import

_SCANNED_ALIKE, _SCANNED = 64, 100_000
"""Over how many batches of one size, and over how many in all a loader's largest batch is looked for."""

_SECONDS = 0.5
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


def scan(batches: Iterator[Any], load: Callable[[Any], Any], seconds: float, samples: float = math.inf) -> Scan:
    """Take batches, and weigh them, until there are no more, all are equal, time ends, or ``samples`` were taken.

    So many samples are in the data set: a loader whose batches were made larger reads it many times over.
    """
    found, until = Scan([], []), time.monotonic() + seconds
    for batch in islice(batches, _SCANNED):
        found.batches.append(batch)
        if batch is None or (isinstance(batch, list) and batch[:1] == [None]):
            return Scan(found.batches, [])
        found.sizes.append(_bytes(load(batch)))
        samples -= len(batch) if isinstance(batch, list) else 1
        if samples <= 0:
            break
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
        self._evaluated: set[int | None] = set()
        self._given: list[tuple[Callable[[Any], Any], Any]] = []
        self._left: Iterator[Any] = iter(())

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Note the loaders that are made inside the block."""

        def trainers(module: ModuleType) -> AbstractContextManager[None]:
            return changed(module.Trainer, "__init__", _adding(self._trainers))

        with (
            changed(DataLoader, "__init__", _adding(self._waiting)),
            patch_on_import({"transformers.trainer": trainers}, {}, lambda package: None),
        ):
            yield

    def ordered(self, loader: DataLoader[Any], batches: Iterator[Any], load: Callable[[Any], Any]) -> Iterator[Any]:
        """Return the batches of an epoch; of one that trains, what is given is noted."""
        self._waiting.discard(loader)
        if not torch.is_grad_enabled():
            self._evaluated.add(loader.batch_size)
            return batches
        self._left = batches
        return self._giving(batches, load)

    def _giving(self, batches: Iterator[Any], load: Callable[[Any], Any]) -> Iterator[Any]:
        for batch in batches:
            self._given.append((load, batch))
            yield batch

    def read(self, built: Built) -> Built:
        """Return what is known of a run with what its loaders would still give."""
        more: dict[str, Any] = {}
        with suppress(Exception):  # of a data set that cannot be read twice: nothing is known
            largest, until = 0, time.monotonic() + _SECONDS
            for load, batch in self._given:
                largest = max(largest, _bytes(load(batch)))
                if time.monotonic() > until:
                    break
            if largest and time.monotonic() <= until:  # else reading ahead takes too long
                found = max(scan(self._left, self._given[-1][0], _SECONDS).sizes, default=0)
                more |= {"larger_batches": found / largest} if found > _MORE * largest else {}
        with suppress(AttributeError):  # of a Trainer of another make
            evaluating = (each for each in self._trainers if each.args.eval_strategy != "no" and each.eval_dataset)
            rows = {loader.batch_size for loader in self._waiting} | {each.args.eval_batch_size for each in evaluating}
            largest = max((each for each in rows - self._evaluated if each is not None), default=0)
            more |= {"waiting_rows": largest} if largest > (built.batch_size or largest) else {}
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
