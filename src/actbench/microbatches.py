"""A batch cut into micro-batches, and what the loss of each adds to the loss of the batch."""

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
"""From a micro-batch and its batch to the factor of its loss: the products add up to the loss of the batch."""

IGNORED_LABEL = -100  # what cross_entropy leaves out by default


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch; its loss times ``share`` is what they add to the loss of the batch."""

    batch: Batch
    rows: slice
    share: float


def rows_of(batch: Batch) -> int | None:
    """Return how many rows the tensors and lists of a batch have; None where they differ, or there are none.

    Tensors without a dimension, and those of one row beside others of more, are of no row.
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


def cut(batch: Batch, parts: int, share: Share | None = None) -> list[MicroBatch]:
    """Cut a batch into parts as ``torch.tensor_split`` does, the larger ones first; copy nothing.

    Args:
        batch: Tensors and lists with a row for each sample.
        parts: Of a batch with fewer rows, each part is a row.
        share: None for :func:`label_share`.

    Raises:
        UsageError: The batch is to be cut, and its tensors are not of the same rows.
    """
    if parts == 1:
        return [MicroBatch(batch, slice(None), 1.0)]
    rows = rows_of(batch)
    if rows is None:
        shapes = ", ".join(f"{name} {_shape(value)}" for name, value in batch.items())
        raise UsageError(
            f"a batch of {shapes} cannot be cut into {parts} micro-batches: all of its tensors and lists must have a "
            "row for each sample; leave accumulate (gradient_accumulation) out"
        )
    size, larger = divmod(rows, min(rows, parts))
    ends = [part * size + min(part, larger) for part in range(min(rows, parts) + 1)]
    places = [slice(first, last) for first, last in itertools.pairwise(ends)]
    cuts = [{name: _taken(value, place, rows) for name, value in batch.items()} for place in places]
    of = share or label_share
    return [MicroBatch(part, place, of(part, batch)) for part, place in zip(cuts, places, strict=True)]


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"({type(value).__name__})"


def _taken(value: Any, place: slice, rows: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _taken(each, place, rows) for name, each in value.items()}
    has_rows = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim())
    return value[place] if has_rows and len(value) == rows else value


def label_share(part: Batch, batch: Batch, *, first: int = 0) -> float:
    """Return the share of a part in the labels of a batch that count, for a loss that is a mean over these.

    Labels are whole numbers under ``labels`` and count unless they are -100, those before place ``first`` of a row left
    out. Where a batch has none, or their values are unknown, it is the share of the rows, for a mean over rows.
    """
    mine, all_of_them = _counted(part, first), _counted(batch, first)
    return mine / all_of_them if mine is not None and all_of_them else (rows_of(part) or 1) / (rows_of(batch) or 1)


def _counted(batch: Batch, first: int) -> int | None:
    labels = batch.get("labels")
    unknown = isinstance(labels, FakeTensor) or active_fake_mode() is not None
    if unknown or not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        return None
    return int((labels[..., first:] != IGNORED_LABEL).sum())
