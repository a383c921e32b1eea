"""The size of past gradients of single samples of the data set, to allocate bits to the rows of a batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.errors import UsageError

_current: ContextVar[Samples | None] = ContextVar("_current", default=None)
_again: ContextVar[bool] = ContextVar("_again", default=False)
"""Whether a forward pass that runs within backward has the samples of :data:`_current`."""


class Samples:
    """The samples of the data set that a batch holds; see :func:`samples`.

    Args:
        ids: (N,) integers from 0, in host memory.

    Raises:
        UsageError: The ids are invalid.
    """

    def __init__(self, ids: ArrayLike | Tensor) -> None:
        if isinstance(ids, Tensor) and ids.device.type != "cpu":
            raise UsageError(
                f"samples() was given ids on {ids.device}, where reading them would hold up every step; give them as "
                "the data loader does, in host memory"
            )
        found = np.asarray(ids)
        if found.ndim != 1 or (found.size and (found.dtype.kind not in "iu" or found.min() < 0)):
            raise UsageError(
                f"samples() needs the index in the data set of each row of the batch, found {found.dtype} of shape "
                f"{found.shape}; give one whole number from 0 for each row"
            )
        self.count, self.end = found.size, int(found.max(initial=-1)) + 1
        self._on = {torch.device("cpu"): torch.tensor(found, dtype=torch.int64, device="cpu")}
        self._token: Token[Samples | None] | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the ids, int64 (N,), on a device."""
        if device not in self._on:
            self._on[device] = self._on[torch.device("cpu")].to(device, non_blocking=True)
        return self._on[device]

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._token is not None:
            _current.reset(self._token)
            self._token = None


def samples(ids: ArrayLike | Tensor) -> Samples:
    """Name the samples of the data set that the next batches hold, for schemes that remember gradients of samples.

    Call it before each step, or around one: ``with actbench.samples(ids): loss = model(batch)``. It is valid in this
    thread until the next call, or until the with-block ends.

    Args:
        ids: (N,) the index in the data set of each row of the batch, in host memory.

    Raises:
        UsageError: The ids are invalid.
    """
    named = Samples(ids)
    named._token = _current.set(named)
    return named


def current() -> Samples | None:
    """Return the samples that this thread has named last."""
    return _current.get()


@contextmanager
def as_of(named: Samples | None) -> Iterator[None]:
    """Use earlier samples for forward passes inside, which belong to them."""
    tokens = _current.set(named), _again.set(True)
    try:
        yield
    finally:
        _current.reset(tokens[0])
        _again.reset(tokens[1])


class SampleGradients:
    """Squared norms of the gradients of one layer's output, sample by sample (ActNN, arXiv 2104.14129, section 4.2).

    A table on the gradients' device has one float32 for each sample that was seen; each new norm is averaged with the
    old one, half and half. Nothing waits for the device. If the samples of a batch are not named (:func:`samples`), all
    its rows count the same.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._batch: Samples | None = None

    def begin(self, x: Tensor) -> None:
        """Begin a forward pass on the rows of x, with the samples that are named now.

        In a forward pass that runs again within backward the samples stay the same, or are those of :func:`as_of`:
        autograd's threads do not see what the main thread named.
        """
        if torch._C._current_graph_task_id() != -1 and not _again.get():
            return
        self._batch = None if isinstance(x, FakeTensor) else _named(x.shape[0] if x.dim() else 1)

    def expected(self, device: torch.device) -> Tensor | None:
        """Return the past squared norms of the batch's samples, float32 (rows,); None if the samples are not known.

        A sample that was never seen counts as the mean of the others.
        """
        if self._batch is None or self._table is None:
            return None
        ids = self._batch.on(device)
        known = self._room(self._batch.end, device)[ids]
        return torch.where(known.isnan(), known.nanmean(), known).nan_to_num(nan=1.0)

    def note(self, squares: Tensor) -> None:
        """Add the squared norms of a batch, (rows,), to the table; norms that are not finite are skipped."""
        if self._batch is None or isinstance(squares, FakeTensor) or squares.shape != (self._batch.count,):
            return
        ids = self._batch.on(squares.device)
        table = self._room(self._batch.end, squares.device)
        old = table[ids]
        new = torch.where(old.isnan(), squares, (old + squares) / 2)
        table.index_copy_(0, ids, torch.where(squares.isfinite(), new, old))

    def _room(self, end: int, device: torch.device) -> Tensor:
        """Return the table with room for ids up to ``end - 1``, on the device; NaN for samples never seen."""
        table = self._table
        if table is None or len(table) < end:
            # twice as long, so that new samples do not copy the table in each step
            grown = torch.full((max(end, 2 * (0 if table is None else len(table))),), torch.nan, device=device)
            if table is not None:
                grown[: len(table)] = table
            table = grown
        self._table = table.to(device)
        return self._table

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_batch": None}

    def adapted(self) -> Any:
        """Return the table, and the ids of the last batch; see :class:`actbench.packing.forwardwrapper.Adapted`."""
        ids = None if self._batch is None else self._batch.on(torch.device("cpu"))
        return {"table": self._table, "ids": ids}

    def adapt(self, state: Any) -> None:
        """Restore what :meth:`adapted` returned."""
        self._table = state["table"]
        self._batch = None if state["ids"] is None else Samples(state["ids"].cpu())


def _named(rows: int) -> Samples | None:
    """Return the samples that are named now, if they are as many as the rows."""
    batch = _current.get()
    if batch is not None and batch.count == rows:
        return batch
    if batch is None:
        _warn_once("the samples of the batches are not named: call actbench.samples(ids) before each step")
    else:
        _warn_once(f"actbench.samples() was given {batch.count} ids for {rows} rows: give one for each row")
    return None


@functools.cache
def _warn_once(what: str) -> None:
    warnings.warn(
        f"gradients of single samples are not used, and all rows of a batch count the same; {what}", stacklevel=2
    )
