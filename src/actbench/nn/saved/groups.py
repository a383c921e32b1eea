"""Codes of a few bits in groups that run through a tensor and share an offset and a scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actbench.nn.layout import Layout
from actbench.nn.saved import fractions
from actbench.nn.saved.codecs import Codec, Parts
from actbench.nn.saved.sitestate import SiteState
from actbench.ops import bitpack, groupquant
from actbench.ops.groupquant.reference import NAN_WORD
from actbench.ops.seeds import fresh_seed

USUAL = 256
"""Elements of a group, unless another size is asked for."""

NOT_FINITE = "values that are not finite"
"""Why a tensor is left whole whose group would be lost with one of them."""


@dataclass(frozen=True)
class Groups(Codec):
    """Codes in groups that run through the tensor in the order of its memory; parts are codes and words.

    Attributes:
        width: Bits an element is to have on average, 1 to 8; of a fraction, groups in front have a bit more.
        group_size: Elements that share an offset and a scale.
        stochastic: Whether rounding is.
        usual: The group size for which the ranges of the site are noted.
    """

    width: float
    group_size: int
    stochastic: bool = True
    usual: int = USUAL

    def encode(self, flat: Tensor, layout: Layout) -> Parts:
        """Return the parts of a tensor."""
        return fractions.encode(flat, self.width, self.group_size, self.stochastic)

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return ``count`` elements from ``start`` on; widths are read off the bytes of a recomputation."""
        return fractions.decode(parts, layout.elements, self.group_size, layout.dtype, start, count)

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return the parts of a tensor."""
        parts = self.encode(flat, layout)
        if site.watched:
            site.ranges = as_usual(groupquant.ranges(parts[1]).square().sum(), self.group_size, self.usual)
        return parts

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the decoded tensor."""
        return layout.laid_out(self.decode(parts, layout, 0, layout.elements))

    def divisible(self, layout: Layout) -> bool:
        """Return whether dimension 0 is outermost in memory."""
        return layout.has_rows

    def rows(self, parts: Parts, layout: Layout, first: int, last: int) -> Tensor:
        """Return decoded rows."""
        if not self.divisible(layout):
            return super().rows(parts, layout, first, last)
        wanted = layout.rows(first, last)
        return wanted.laid_out(self.decode(parts, layout, first * layout.shape[1:].numel(), wanted.elements))

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of all codes, and 4 for each group."""
        width, wider = fractions.division(layout.elements, self.width, self.group_size)
        codes = wider * (width + 1) // 8 + bitpack.packed_bytes(layout.elements - wider, width)
        return codes + 4 * -(-layout.elements // self.group_size)

    def bits(self, layout: Layout) -> float:
        """Return the bits that a code has on average."""
        return fractions.mean_bits(layout.elements, self.width, self.group_size)

    def lost(self, flat: Tensor, parts: Parts) -> str | None:
        """Return that a value made others of its group NaN."""
        return not_finite(parts)


@dataclass(frozen=True)
class OneGroup(Groups):
    """Codes of one width in one group, in the order of the tensor's memory; parts are codes and one word."""

    def encode(self, flat: Tensor, layout: Layout) -> Parts:
        """Return the parts of a tensor."""
        return groupquant.encode_in_one(flat, int(self.width), fresh_seed(), self.stochastic)

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return elements."""
        codes, word = parts
        width = codes.numel() * 8 // layout.elements  # which may be a recomputation's, after the bits had changed
        return groupquant.decode_in_one(codes, word, width, start, count, layout.dtype)

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the codes, and 4."""
        return bitpack.packed_bytes(layout.elements, int(self.width)) + 4

    def bits(self, layout: Layout) -> float:
        """Return the bits of a code."""
        return self.width


def as_usual(squares: Tensor, group_size: int, usual: int) -> Tensor:
    """Return sums over groups of a size as they would be over groups of the usual one."""
    return squares if group_size == usual else squares * (group_size / usual)


def not_finite(parts: Parts) -> str | None:
    """Return that a group has a value that is not finite, as a reason to leave a tensor whole, or None."""
    return NOT_FINITE if bool((parts[1] == NAN_WORD).any()) else None
