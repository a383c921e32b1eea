"""Codes of a few bits in groups that run through a tensor and share an offset and a scale.

Where bits are a fraction, the first groups have one bit more than the others. The widths are read off the bytes of the
codes, not kept beside them: codes that a recomputation made may be of other bits than those of the first forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actbench.nn.layout import Layout
from actbench.nn.saved.codecs import Codec, Parts
from actbench.nn.saved.sitestate import SiteState
from actbench.ops import bitpack, groupquant
from actbench.ops.groupquant.reference import NAN_WORD
from actbench.ops.noise import fresh_seed

USUAL = 256
"""Elements of a group, unless another size is asked for."""

NOT_FINITE = "values that are not finite"
"""Why a tensor is left whole whose group would be lost with one of them."""

_FEWEST = 8
"""Elements that are left behind the wider groups, unless none is: fewer could not be told from padding."""


class GroupCodec(Codec):
    """Codes and words, of which a part of the tensor can be decoded alone."""

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return ``count`` elements of the tensor's memory from ``start`` on."""
        raise NotImplementedError

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the decoded tensor."""
        return layout.laid_out(self.decode(parts, layout, 0, layout.elements))

    def divisible(self, layout: Layout) -> bool:
        """Return whether dimension 0 is outermost in memory; another view of the memory may be of another order."""
        return layout.has_rows

    def rows(self, parts: Parts, layout: Layout, first: int, last: int) -> Tensor:
        """Return decoded rows."""
        if not self.divisible(layout):
            return super().rows(parts, layout, first, last)
        wanted = layout.rows(first, last)
        return wanted.laid_out(self.decode(parts, layout, first * layout.shape[1:].numel(), wanted.elements))

    def lost(self, flat: Tensor, parts: Parts) -> str | None:
        """Return that a value made others of its group NaN."""
        return NOT_FINITE if bool((parts[1] == NAN_WORD).any()) else None


@dataclass(frozen=True)
class Groups(GroupCodec):
    """Codes in groups that run through the tensor in the order of its memory; parts are codes and words.

    Attributes:
        width: Bits an element is to have on average, 1 to 8.
        group_size: Elements that share an offset and a scale.
        stochastic: Whether rounding is.
        usual: The group size for which the ranges of the site are noted.
    """

    width: float
    group_size: int
    stochastic: bool = True
    usual: int = USUAL

    def encode(self, flat: Tensor, layout: Layout) -> Parts:
        """Return uint8 codes, those of the wider groups first, and the int32 words of the groups."""
        size, (width, wider) = self.group_size, self.division(layout)
        if not wider:
            return groupquant.encode(flat, width, size, fresh_seed(), self.stochastic)
        front, split = wider * (width + 1) // 8, wider // size
        # Written to their places: if they were joined afterwards, both parts and the whole would be there at once.
        codes = flat.new_empty(front + bitpack.packed_bytes(flat.numel() - wider, width), dtype=torch.uint8)
        words = flat.new_empty(-(-flat.numel() // size), dtype=torch.int32)
        for part in (
            (codes[:front], words[:split], flat[:wider], width + 1),
            (codes[front:], words[split:], flat[wider:], width),
        ):
            groupquant.encode_(*part, size, fresh_seed(), self.stochastic)
        return codes, words

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return elements; the widths are those of the codes, which a recomputation may have made of other bits."""
        (codes, words), size, dtype = parts, self.group_size, layout.dtype
        width = codes.numel() * 8 // layout.elements
        wider = (codes.numel() - bitpack.packed_bytes(layout.elements, width)) * 8
        if not wider:
            return groupquant.decode(codes, words, width, size, start, count, dtype)
        end, rest = start + count, (codes[wider * (width + 1) // 8 :], words[wider // size :])
        if end <= wider:
            return groupquant.decode(codes, words, width + 1, size, start, count, dtype)
        if start >= wider:
            return groupquant.decode(*rest, width, size, start - wider, count, dtype)
        out = codes.new_empty(count, dtype=dtype)
        groupquant.decode_(out[: wider - start], codes, words, width + 1, size, start)
        groupquant.decode_(out[wider - start :], *rest, width, size, 0)
        return out

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return the parts of a tensor."""
        parts = self.encode(flat, layout)
        if site.watched:
            site.ranges = as_usual(groupquant.ranges(parts[1]).square().sum(), self.group_size, self.usual)
        return parts

    def division(self, layout: Layout) -> tuple[int, int]:
        """Return the smaller width, and how many elements in front have one bit more: whole groups."""
        count, size, width = layout.elements, self.group_size, int(self.width)
        wider = round((self.width - width) * count / size) * size
        if count % size == 0 and wider == count:
            return width + 1, 0
        return width, max(0, min(wider, (count - _FEWEST) // size * size))

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of all codes, and 4 for each group."""
        width, wider = self.division(layout)
        codes = wider * (width + 1) // 8 + bitpack.packed_bytes(layout.elements - wider, width)
        return codes + 4 * -(-layout.elements // self.group_size)

    def bits(self, layout: Layout) -> float:
        """Return the bits that a code has on average."""
        width, wider = self.division(layout)
        return width + wider / layout.elements


@dataclass(frozen=True)
class OneGroup(Groups):
    """Codes of one width in one group, in the order of the tensor's memory; parts are codes and one word."""

    def encode(self, flat: Tensor, layout: Layout) -> Parts:
        """Return the parts of a tensor."""
        return groupquant.encode_in_one(flat, int(self.width), fresh_seed(), self.stochastic)

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return elements, by the width of the codes."""
        codes, word = parts
        return groupquant.decode_in_one(codes, word, codes.numel() * 8 // layout.elements, start, count, layout.dtype)

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the codes, and 4."""
        return bitpack.packed_bytes(layout.elements, int(self.width)) + 4

    def bits(self, layout: Layout) -> float:
        """Return the bits of a code."""
        return self.width


def as_usual(squares: Tensor, group_size: int, usual: int) -> Tensor:
    """Return sums over groups of a size as they would be over groups of the usual one."""
    return squares if group_size == usual else squares * (group_size / usual)
