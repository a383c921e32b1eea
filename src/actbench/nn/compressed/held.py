"""What the backward pass of a layer has of the layer's input, whole or in pieces of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actbench.nn.keeping import Form, Keeper, Kept, Parts, Place
from actbench.nn.keeping.around import OnHost
from actbench.nn.layout import as_it_lay, memory_order

Sums = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Held:
    """A layer's input as it was kept.

    Attributes:
        form: What its parts are; None where nothing of it was kept.
        parts: Held by autograd.
        chunk: Into how many pieces of the batch it may be cut, at most.
    """

    form: Form | None
    parts: Parts
    chunk: int

    def pieces(self) -> list[slice]:
        """Return the rows (entries of dimension 0) of each piece; one piece where single rows cannot be had."""
        assert self.form is not None
        rows = self.form.shape[0]
        count = min(self.chunk, rows) if self.form.divisible else 1
        return [slice(rows * i // count, rows * (i + 1) // count) for i in range(max(count, 1))]

    def rows(self, piece: slice) -> Tensor:
        """Return the input's rows of a piece."""
        assert self.form is not None
        if piece == slice(0, self.form.shape[0]):
            return self.form.restore(self.parts)
        return self.form.rows(self.parts, piece.start, piece.stop)


def keep(x: Tensor, keeper: Keeper, place: Place, needed: bool) -> Kept | None:
    """Return what is kept of a layer's input, or None where its backward pass does not need it."""
    if needed:
        return keeper.keep(x, place)
    place.owner, place.elements = None, 0
    return None


def save(
    ctx: Any, kept: Kept | None, place: Place, keeper: Keeper, *others: Tensor | None, by_row: bool = True
) -> None:
    """Save other tensors and what was kept of the input.

    Parts are saved and not put on ``ctx``: autograd frees them after backward, and under non-re-entrant checkpointing
    they come from the recomputation.

    Args:
        ctx: Of the function.
        kept: What was kept of the input, or None.
        place: Whom it was kept for.
        keeper: Who kept it.
        *others: Other tensors, which hooks around the layer are to leave as they are: weights and statistics.
        by_row: Whether the backward pass can be cut into pieces of the batch.
    """
    ctx.form, ctx.place, ctx.keeper, ctx.by_row = None if kept is None else kept.form, place, keeper, by_row
    ctx.others = len(others)
    keeper.leave(tensor for tensor in others if tensor is not None)
    ctx.save_for_backward(*others, *(() if kept is None else kept.parts))


def saved(ctx: Any, grad: Tensor) -> tuple[Held, Sequence[Any]]:
    """Return the input and the other tensors that were saved.

    Args:
        ctx: Of the function.
        grad: The gradient of the output.
    """
    tensors = ctx.saved_tensors
    form: Form | None = ctx.form
    parts = tensors[ctx.others :]
    if isinstance(form, OnHost):  # brought back once, for all pieces
        parts, form = form.fetched(parts), form.inner
    size_bytes = grad.nbytes + (0 if form is None else form.shape.numel() * form.dtype.itemsize)
    return Held(form, parts, ctx.keeper.pieces(size_bytes) if ctx.by_row else 1), tensors[: ctx.others]


def summed(pieces: list[slice], compute: Callable[[slice], Sums]) -> Sums:
    """Return the sums over all pieces of what ``compute`` gives for one; those of halves are gathered in float32.

    What it makes is freed before the next piece is computed, but for the sums.
    """
    first = compute(pieces[0])
    if len(pieces) == 1:
        return first
    sums = [None if each is None else each.to(wide(each.dtype)) for each in first]
    types = [None if each is None else each.dtype for each in first]
    del first
    for piece in pieces[1:]:
        for total, each in zip(sums, compute(piece), strict=True):
            if total is not None and each is not None:
                total.add_(each)
    return tuple(None if total is None else total.to(dtype) for total, dtype in zip(sums, types, strict=True))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to gather numbers of a type in."""
    return torch.promote_types(dtype, torch.float32)


class RowByRow:
    """A tensor of all rows that is written piece by piece, laid out in memory as its first piece.

    Args:
        rows: How many there will be.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.whole: Tensor | None = None

    def write(self, piece: slice, values: Tensor) -> None:
        """Write the rows of a piece."""
        self.room(piece, values)[:] = values

    def room(self, piece: slice, like: Tensor) -> Tensor:
        """Return where the rows of a piece go, which are of the type and row shape of ``like``."""
        if self.whole is None:
            order = memory_order(like)
            shape = (self._rows, *like.shape[1:])
            dims = range(len(shape)) if order is None else order
            self.whole = as_it_lay(like.new_empty([shape[dim] for dim in dims]), order)
        return self.whole[piece]
