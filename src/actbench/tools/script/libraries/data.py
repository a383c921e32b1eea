"""Data that a script loads: every batch is fetched for real, one after another, in this process and thread.

``DataLoader`` objects keep the attributes that the script gave them, as accelerate and Lightning read them. Only their
iteration differs: there are no workers, no thread that pins memory and no time limit, and ``worker_init_fn`` is not
called. The batches are those of ``num_workers=0``.

A batch size that the user asks for goes to each loader that shuffles, when it is made, and to each other loader of
batches that is iterated while gradients are recorded. A loader that a script iterates under ``torch.no_grad()`` keeps
its own, as it evaluates. An epoch keeps its number of batches: a small data set is read several times over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    dataloader as torchs,
)

from actbench.tools.script.libraries.importpatches import Change, changed
from actbench.tools.script.libraries.saving import methods_changed

Note = Callable[[str], None]
Real = Callable[[], AbstractContextManager[None]]
Ordered = Callable[[DataLoader[Any], Iterator[Any], Callable[[Any], Any]], Iterator[Any]]

_PREPARING = (("Dataset", "_download"), ("Dataset", "_process"), ("Dataset", "__getitem__"))
"""Methods of PyTorch Geometric's data sets that make files from raw data, and samples by transforms."""

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ALONE = {"num_workers": 0, "timeout": 0, "pin_memory": False}


@contextmanager
def loaded_here(
    note: Note,
    real: Real,
    batch_size: int | None,
    fetched: Callable[[int], object] = lambda rows: None,
    ordered: Ordered | None = None,
) -> Iterator[None]:
    """Inside the block, let each ``DataLoader`` fetch its batches in this process, each inside ``real()``.

    Args:
        note: Receives a sentence about a loader whose batches cannot get the size.
        real: Makes the context in which data sets, samplers and collators run.
        batch_size: Rows of a batch of the loaders that train; None leaves each its own.
        fetched: Is told the samples of each batch that is fetched while gradients are recorded.
        ordered: Returns the batches of an epoch that are made, of a loader, what it makes its batches of, and the
            function that makes one; None makes all.
    """
    fetching = _fetching(real, fetched, ordered)

    def iterating(_: Any) -> Any:
        def get_iterator(self: DataLoader[Any]) -> Any:
            if batch_size is not None and torch.is_grad_enabled():
                resize(self, batch_size, note)
            return fetching(self)

        return get_iterator

    def making(init: Any) -> Any:
        def made(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if batch_size is not None and _shuffles(self.sampler):
                resize(self, batch_size, note)

        return made

    def uncounted(_: Any) -> Any:
        return lambda self: None  # no processor is too few for workers that are never started

    with (
        changed(DataLoader, "_get_iterator", iterating),
        changed(DataLoader, "__init__", making),
        changed(DataLoader, "check_worker_number_rationality", uncounted),
    ):
        yield


def changes(real: Real) -> dict[str, Change]:
    """Return the changes that let data sets which prepare files when they are made do so inside ``real()``.

    What they write is read by later runs of the script, too.
    """

    def within(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with real():
                return own(*args, **options)

        return call

    def loading(own: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **options: Any) -> Any:
            with real():  # a load calls no operator by which its tensors would be counted: copies do
                return tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, own(*args, **options))

        return load

    return {
        "torch_geometric.data.dataset": methods_changed(_PREPARING, lambda method: within),
        "torch_geometric.io.fs": lambda module: changed(module, "torch_load", loading),
    }


def _fetching(
    real: Real, fetched: Callable[[int], object], ordered: Ordered | None
) -> Callable[[DataLoader[Any]], Any]:
    """Return the class of iterators that fetch each batch inside ``real()``."""
    base: Any = torchs._SingleProcessDataLoaderIter

    class Fetching(base):  # type: ignore[misc]
        def __init__(self, loader: DataLoader[Any]) -> None:
            with real(), _alone(loader):
                super().__init__(loader)
            if ordered is not None:
                batches: Iterator[Any] = vars(self)["_sampler_iter"]
                self._sampler_iter = ordered(loader, batches, self._made)

        def _made(self, index: Any) -> Any:
            with real():
                return self._dataset_fetcher.fetch(index)

        def _next_index(self) -> Any:
            index = super()._next_index()
            if isinstance(index, list) and torch.is_grad_enabled():
                fetched(len(index))
            return index

        def _next_data(self) -> Any:
            with real():
                return super()._next_data()

    return Fetching


@contextmanager
def _alone(loader: DataLoader[Any]) -> Iterator[None]:
    """Inside the block, let a loader have no workers, whatever its script asked for."""
    own = {name: vars(loader)[name] for name in _ALONE}
    vars(loader).update(_ALONE)
    try:
        yield
    finally:
        vars(loader).update(own)


def _shuffles(sampler: Any) -> bool:
    return isinstance(sampler, _SHUFFLING) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)


def resize(loader: DataLoader[Any], rows: int, note: Note) -> None:
    """Let a loader make batches of ``rows`` rows, and as many of them in an epoch as before.

    accelerate and Lightning wrap the sampler of batches: the innermost one is changed. A loader that makes no batches
    itself, or by a class of the script's own, keeps its batches; ``note`` is told.
    """
    batches: Any = loader.batch_sampler
    while type(batches) is not BatchSampler and hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if not isinstance(batches, BatchSampler):
        what = "its data set makes the batches" if batches is None else f"{type(batches).__name__} makes the batches"
        note(f"A DataLoader keeps its own batch size, not the requested {rows}: {what}.")
        return
    if batches.batch_size != rows:
        batches.sampler = _several_times(batches, rows)
        batches.batch_size = rows
    if loader.batch_size is not None:
        vars(loader)["batch_size"] = rows


def _several_times(batches: BatchSampler, rows: int) -> Any:
    """Return the sampler of rows, read again and again until the batches of an epoch are full."""
    try:
        wanted = len(batches) * rows
        enough = len(batches.sampler) >= wanted and rows <= batches.batch_size  # type: ignore[arg-type]
    except TypeError:  # no length: a data set that is only iterated
        return batches.sampler
    return batches.sampler if enough or not wanted else _Repeated(batches.sampler, wanted)


class _Repeated(Sampler[Any]):
    """Yields the rows of a sampler, again and again, until a number of them is reached."""

    def __init__(self, sampler: Any, wanted: int) -> None:
        self.sampler, self._wanted = sampler, wanted

    def __getattr__(self, name: str) -> Any:
        """Answer as the sampler does, for example ``set_epoch``."""
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        return self._wanted

    def __iter__(self) -> Iterator[Any]:
        left = self._wanted
        while left > 0:
            before = left
            for row in self.sampler:
                yield row
                left -= 1
                if not left:
                    return
            if left == before:
                return  # an empty sampler
