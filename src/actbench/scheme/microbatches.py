"""A batch cut into micro-batches, and the share of each in the loss of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from actbench.errors import UsageError

Batch = Mapping[str, Any]
Share = Callable[[Batch, Batch], float]
"""From a micro-batch and its batch to a factor: the sum of the parts' losses times their factors is the whole loss."""

IGNORED_LABEL = -100  # the ignore_index that cross_entropy has by default


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch; their loss times ``share`` is their part of the loss of the batch."""

    batch: Batch
    rows: slice
    share: float


def rows_of(batch: Batch) -> int | None:
    """Return the number of rows of the tensors and lists of a batch; None if they differ, or there are none.

    Scalars do not count, nor do tensors of one row beside tensors of more.
    """
    heights = set(_heights(batch))
    heights = heights - {1} or heights
    return heights.pop() if len(heights) == 1 else None


def _heights(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _heights(each)
    elif isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim()):
        yield len(value)


def cut(batch: Batch, parts: int, share: Share | None = None, uncut: str = "") -> list[MicroBatch]:
    """Cut a batch as ``torch.tensor_split`` does, the larger parts first; copy nothing.

    Args:
        batch: Tensors and lists with a row for each sample.
        parts: Number of micro-batches; a batch with fewer rows gives one for each row.
        share: None for :func:`label_share`.
        uncut: Why rows of the batch are no samples; empty if they are.

    Raises:
        UsageError: ``parts`` is not 1, and the tensors differ in their number of rows, or rows are no samples.
    """
    if parts == 1:
        return [MicroBatch(batch, slice(None), 1.0)]
    if uncut:
        raise UsageError(
            f"{uncut}, so it cannot be cut into {parts} micro-batches: make tensors with a row for each sample and "
            "join them in the loss, or leave accumulate (gradient_accumulation) out"
        )
    rows = rows_of(batch)
    if rows is None:
        raise UsageError(
            f"a batch of {shapes(batch)} cannot be cut into {parts} micro-batches: all of its tensors and lists must "
            "have a row for each sample; leave accumulate (gradient_accumulation) out"
        )
    size, larger = divmod(rows, min(rows, parts))
    ends = [part * size + min(part, larger) for part in range(min(rows, parts) + 1)]
    places = [slice(first, last) for first, last in itertools.pairwise(ends)]
    cuts = [{name: _taken(value, place, rows) for name, value in batch.items()} for place in places]
    of = share or label_share
    return [MicroBatch(part, place, of(part, batch)) for part, place in zip(cuts, places, strict=True)]


@dataclass(frozen=True)
class MicroBatching:
    """How a step cuts its batch.

    Attributes:
        parts: How many micro-batches a step cuts a batch into; fewer if the batch has fewer rows.
        share: Weight of a micro-batch's loss in the loss of the batch; None for :func:`label_share`.
        uncuttable: Why the losses of micro-batches do not add up to the loss of the batch; empty if they do.
        uncut: Returns why batches cannot be cut by their rows; empty if they can, as far as is known.
    """

    parts: int = 1
    share: Share | None = None
    uncuttable: str = ""
    uncut: Callable[[], str] = lambda: ""

    def cut(self, batch: Batch) -> list[MicroBatch]:
        """Return the micro-batches of a batch; see :func:`cut` for what is raised."""
        return cut(batch, self.parts, self.share, self.uncut())


def shapes(batch: Batch) -> str:
    """Return the names and shapes of what a batch holds, for messages."""
    return ", ".join(f"{name} {_shape(value)}" for name, value in batch.items())


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"({type(value).__name__})"


def _taken(value: Any, place: slice, rows: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _taken(each, place, rows) for name, each in value.items()}
    has_rows = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim())
    return value[place] if has_rows and len(value) == rows else value


def label_share(part: Batch, batch: Batch, *, first: int = 0) -> float:
    """Return the share of a part in the counted labels of a batch, for a loss that is a mean over these labels.

    Labels are int64 under ``labels``. All count but -100 and those before place ``first`` of a row. Without labels, or
    if their values are unknown, return the share of the rows, for a mean over rows.
    """
    mine, all_of_them = _counted(part, first), _counted(batch, first)
    return mine / all_of_them if mine is not None and all_of_them else (rows_of(part) or 1) / (rows_of(batch) or 1)


def _counted(batch: Batch, first: int) -> int | None:
    labels = batch.get("labels")
    unknown = isinstance(labels, FakeTensor) or active_fake_mode() is not None
    if unknown or not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        return None
    return int((labels[..., first:] != IGNORED_LABEL).sum())
