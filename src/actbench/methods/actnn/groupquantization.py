"""Group quantization: chooses the groups of a tensor, and the bits of each.

A tensor is cut into groups without regard to its rows, but row by row for the input of a norm. A norm divides each row
by the row's own deviation: if a group held the end of a large row and the start of a small one, the error would follow
the large row's range and destroy the small row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from actbench.methods.actnn.groups import USUAL, GroupCodec, Groups, OneGroup, as_usual
from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.solver import row_widths
from actbench.ops.noise import fresh_seed
from actbench.packing.codecs import Codec, Parts
from actbench.packing.layout import Layout, flat_of
from actbench.packing.sitestate import SiteState

SHORTEST = 32
"""Rows with fewer elements share groups: a word for each row would cost a bit an element or more."""


@dataclass(frozen=True)
class GroupQuantization(Codec):
    """The settings of group quantization; chooses groups and bits for each tensor.

    Attributes:
        group_size: Elements that share an offset and a scale, a multiple of 32 from 32 to 1024; fewer at the end of a
            row that a norm reads.
        stochastic: Round up with the probability that keeps the mean; otherwise to the nearest.
        per_group: False for one offset and scale for all of a tensor.
    """

    group_size: int = USUAL
    stochastic: bool = True
    per_group: bool = True

    @property
    def compiles(self) -> bool:
        """Whether hooks may pack by the format in graphs of ``torch.compile``."""
        return True

    def at(self, x: Tensor, site: SiteState) -> Codec:
        """Return the groups of a tensor, and their bits."""
        if x.dtype == torch.bool:
            return super().at(x, site)
        size = size_within(x, site.row, self.group_size)
        if (
            site.per_sample
            and size is not None
            and x.dim() > 1
            and Layout.of(x).has_rows  # else a copy is needed, larger than all that is packed
            and x[0].numel() >= self.group_size  # else a word for each row costs more than different bits gain
        ):
            count = x.shape[0]
            total_bits = min(8 * count, max(count, round(site.bits * count)))
            return RowWidths(total_bits, size, self.stochastic, self.group_size)
        width = min(8.0, max(1.0, site.bits))
        if not self.per_group:
            return OneGroup(round(width), x.numel(), self.stochastic, self.group_size)
        return groups_of(x, width, site.row, self.group_size, self.stochastic)

    def coarser(self, x: Tensor, bits: int, row: int) -> Tensor:
        """Return a tensor rounded to this many bits."""
        x = x.contiguous()
        codec, layout = groups_of(x, bits, row, self.group_size), Layout.of(x)
        return codec.unpack(codec.encode(flat_of(x), layout), layout)


@dataclass(frozen=True)
class RowGroups(Groups):
    """Codes in groups that belong to one row each; the codes of a row have the same bits and begin at a whole byte."""

    row: int = 1

    def planned(self, x: Tensor) -> None:
        """Return None: rows have an operator of their own."""

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the decoded tensor."""
        return GroupCodec.unpack(self, parts, layout)

    def encode(self, flat: Tensor, layout: Layout) -> Parts:
        """Return the parts of a tensor."""
        rows, total_bits = flat.view(-1, self.row), self._total_bits(layout)
        widths = _widths(len(rows), total_bits, flat)
        return groupquant.encode_rows(rows, widths, total_bits, self.group_size, fresh_seed(flat), self.stochastic)

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return whole rows."""
        codes, words = parts
        widths = _widths(layout.elements // self.row, codes.numel() // -(-self.row // 8), codes)
        return _decoded_rows(codes, words, widths, self.row, self.group_size, start, count, layout.dtype)

    def divisible(self, layout: Layout) -> bool:
        """Return whether dimension 0 is outermost in memory, and its entries are one or several whole rows."""
        return super().divisible(layout) and layout.shape[1:].numel() % self.row == 0

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the codes of each row, and 4 for each group."""
        rows = layout.elements // self.row
        return self._total_bits(layout) * -(-self.row // 8) + rows * 4 * -(-self.row // self.group_size)

    def bits(self, layout: Layout) -> float:
        """Return the mean bits of the rows."""
        return self._total_bits(layout) / (layout.elements // self.row)

    def _total_bits(self, layout: Layout) -> int:
        return round(layout.elements // self.row * self.width)


@dataclass(frozen=True)
class RowWidths(GroupCodec):
    """Codes whose bits differ from row to row; parts are codes, words and the bits, int32 ``(rows,)``.

    Attributes:
        total_bits: Sum of the bits of all rows.
    """

    total_bits: int
    group_size: int
    stochastic: bool = True
    usual: int = USUAL

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Allocate the bits to the rows by their ranges and expected gradients, and return the parts."""
        rows = flat.view(layout.shape[0], -1)
        costs = groupquant.group_ranges(rows, self.group_size).square().sum(1)
        if site.watched:
            site.ranges = as_usual(costs, self.group_size, self.usual)
        gradients = None if site.sample_gradients is None else site.sample_gradients.expected(flat.device)
        widths = row_widths(costs if gradients is None else costs * gradients, self.total_bits)
        seed, size = fresh_seed(flat), self.group_size
        return (*groupquant.encode_rows(rows, widths, self.total_bits, size, seed, self.stochastic), widths)

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return whole rows."""
        codes, words, widths = parts
        row = layout.shape[1:].numel()
        return _decoded_rows(codes, words, widths, row, self.group_size, start, count, layout.dtype)

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the codes of each row, 4 for each group, and 4 for the bits of each row."""
        rows, row = layout.shape[0], layout.shape[1:].numel()
        return self.total_bits * -(-row // 8) + rows * 4 * (-(-row // self.group_size) + 1)

    def bits(self, layout: Layout) -> float:
        """Return the mean bits of the rows."""
        return self.total_bits / layout.shape[0]


def _decoded_rows(
    codes: Tensor, words: Tensor, widths: Tensor, row: int, group_size: int, start: int, count: int, dtype: torch.dtype
) -> Tensor:
    out = codes.new_empty((count // row, row), dtype=dtype)
    groupquant.decode_rows(out, codes, words, widths, group_size, start // row)
    return out


def groups_of(x: Tensor, width: float, row: int, group_size: int, stochastic: bool = True) -> Groups:
    """Return the groups of a tensor whose codes have one number of bits or, for a fraction, two.

    Args:
        x: Any shape and strides.
        width: Average bits of an element, 1 to 8.
        row: Elements of a row that shares no group with another; 0 if rows do not matter.
        group_size: The most elements of a group.
        stochastic: Whether rounding is stochastic.
    """
    size = size_within(x, row, group_size)
    if size is not None:
        return Groups(width, size, stochastic, group_size)
    # as few groups as fit a row, of equal size, rounded up to a multiple of 32
    return RowGroups(width, 32 * math.ceil(row / math.ceil(row / group_size) / 32), stochastic, group_size, row)


def size_within(x: Tensor, row: int, group_size: int) -> int | None:
    """Return the size of groups that run through a tensor in memory order and end where rows do.

    It is ``group_size`` if rows do not matter (``row`` is 0), are too short or not contiguous; None if no size fits.
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
    """Return the bits of each row, with this sum; those of the first rows may be larger by 1."""
    width, wider = divmod(total_bits, rows)
    widths = torch.full((rows,), width, dtype=torch.int32, device=like.device)
    if wider:
        widths[:wider] += 1
    return widths
