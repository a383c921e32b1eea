"""Into which groups a tensor is cut: by default without regard to its rows, and row by row for what a norm reads.

A norm divides each row by the row's own deviation. Where a group holds the end of a large row and the start of a small
one, the error is a part of the large one's range, and nothing is left of the small one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from actbench.nn.keeping import fractions
from actbench.nn.keeping.forms import Grouped, Kept, Parts, laid_out, order_of
from actbench.ops import groupquant
from actbench.ops.seeds import fresh_seed

SHORTEST = 32
"""Elements below which rows share groups: a word for each would cost a bit an element and more."""


@dataclass(frozen=True)
class RowGroups(Grouped):
    """Codes no group of which belongs to two rows; those of a row have one width and begin at a whole byte.

    Attributes:
        row: Elements of a row.
    """

    row: int

    @property
    def divisible(self) -> bool:
        """Whether dimension 0 is outermost in memory, and its entries are rows or several of them."""
        return super().divisible and math.prod(self.shape[1:]) % self.row == 0

    @property
    def bits(self) -> float:
        """Mean of the widths of the rows."""
        rows = self.shape.numel() // self.row
        return round(self.width * rows) / rows

    def _decoded(self, parts: Parts, start: int, shape: torch.Size) -> Tensor:
        codes, meta = parts
        widths = _widths(self.shape.numel() // self.row, codes.numel() // -(-self.row // 8), codes)
        out = codes.new_empty((shape.numel() // self.row, self.row), dtype=self.dtype)
        groupquant.decode_rows(codes, meta, widths, self.group_size, start // self.row, out)
        return laid_out(out, shape, self.order)


def in_groups(x: Tensor, flat: Tensor, width: float, group_size: int, row: int, stochastic: bool) -> Kept:
    """Return a tensor as it is kept in groups, with codes of one width or, where bits are a fraction, of two.

    Args:
        x: Any shape and strides.
        flat: Its elements in the order of its memory.
        width: Bits an element is to have on average, 1 to 8.
        group_size: Elements of a group at most.
        row: Elements of a row that shares no group with another; 0 where rows mean nothing.
        stochastic: Whether rounding is.
    """
    size = size_within(x, row, group_size)
    if size is not None:
        parts = fractions.encode(flat, width, size, stochastic)
        return Kept(Grouped(x.shape, x.dtype, order_of(x), width, size), parts)
    size, rows = 32 * math.ceil(row / math.ceil(row / group_size) / 32), flat.numel() // row
    total_bits = round(rows * width)
    widths = _widths(rows, total_bits, flat)
    parts = groupquant.encode_rows(flat.view(rows, row), widths, total_bits, size, fresh_seed(), stochastic)
    return Kept(RowGroups(x.shape, x.dtype, order_of(x), width, size, row), parts)


def size_within(x: Tensor, row: int, group_size: int) -> int | None:
    """Return the size of groups that run through a tensor in the order of its memory and end where rows do.

    Args:
        x: Any shape and strides.
        row: Elements of a row; 0 where rows mean nothing.
        group_size: Elements of a group at most.

    Returns:
        ``group_size`` where rows mean nothing, are too short or do not lie together; None where no size does it.
    """
    if row < SHORTEST or not _lies_together(x, row):
        return group_size
    size, rest = divmod(row, math.ceil(row / group_size))
    return None if rest or size % 32 else size


def _lies_together(x: Tensor, row: int) -> bool:
    """Return whether the memory of a tensor is one row after the other."""
    size = 1
    for length, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size >= row:
            break
        if length > 1 and stride != size:
            return False
        size *= length
    return size % row == 0


def _widths(rows: int, total_bits: int, like: Tensor) -> Tensor:
    """Return widths of this sum, of which the first may be larger by 1."""
    width, wider = divmod(total_bits, rows)
    widths = torch.full((rows,), width, dtype=torch.int32, device=like.device)
    if wider:
        widths[:wider] += 1
    return widths
