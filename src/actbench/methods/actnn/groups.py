"""Codes of a few bits in groups that run through a tensor and share an offset and a scale.

If bits are a fraction, the first groups have one bit more than the others. Decoding derives the bits from the bytes of
the codes: codes from a recomputation may have other bits than those of the first forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.groupquant.reference import NAN_WORD
from actbench.ops import bitpack
from actbench.ops.library import is_watched
from actbench.ops.noise import fresh_seed
from actbench.packing.codecs import Codec, Encode, Parts
from actbench.packing.layout import Layout, flat_of
from actbench.packing.sitestate import SiteState

USUAL = 256
"""Elements of a group by default."""

NOT_FINITE = "values that are not finite"
"""Why a tensor stays whole: each such value would destroy its group."""

_FEWEST = 8
"""The fewest elements behind the wider groups, unless there are none: fewer would look like padding."""


class GroupCodec(Codec):
    """Codes and words that can be decoded in part."""

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return ``count`` elements in memory order from ``start`` on."""
        raise NotImplementedError

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the decoded tensor."""
        return layout.laid_out(self.decode(parts, layout, 0, layout.elements))

    def divisible(self, layout: Layout) -> bool:
        """Return whether dimension 0 is outermost in memory; another view of the memory may have another order."""
        return layout.has_rows

    def rows(self, parts: Parts, layout: Layout, first: int, last: int) -> Tensor:
        """Return decoded rows."""
        if not self.divisible(layout):
            return super().rows(parts, layout, first, last)
        wanted = layout.rows(first, last)
        return wanted.laid_out(self.decode(parts, layout, first * layout.shape[1:].numel(), wanted.elements))

    def lost(self, flat: Tensor, parts: Parts) -> str | None:
        """Return a reason if a value made others of its group NaN, else None."""
        words = parts[1]
        # an array compares in a fifth of the time that torch takes for so few words, and counts in less than it reduces
        found = np.count_nonzero(words.numpy() == NAN_WORD) if words.is_cpu else (words == NAN_WORD).any()
        return NOT_FINITE if found else None


@dataclass(frozen=True)
class Groups(GroupCodec):
    """Codes in groups that run through the tensor in memory order; parts are codes and words.

    Attributes:
        width: Average bits of an element, 1 to 8.
        group_size: Elements that share an offset and a scale.
        stochastic: Whether rounding is stochastic.
        usual: The group size to which the noted ranges of the site are converted.
    """

    width: float
    group_size: int
    stochastic: bool = True
    usual: int = USUAL

    def encode(self, flat: Tensor, layout: Layout) -> Parts:
        """Return uint8 codes, those of the wider groups first, and the int32 words of the groups."""
        size, (width, wider) = self.group_size, self.division(layout)
        if not wider:
            return groupquant.encode(flat, width, size, fresh_seed(flat), self.stochastic)
        front, split = wider * (width + 1) // 8, wider // size
        # Both parts are written in place: to join them afterwards, the parts and the whole would exist at once.
        codes = flat.new_empty(front + bitpack.packed_bytes(flat.numel() - wider, width), dtype=torch.uint8)
        words = flat.new_empty(-(-flat.numel() // size), dtype=torch.int32)
        parts = [(codes[:front], words[:split], flat[:wider], width + 1)]
        parts += [(codes[front:], words[split:], flat[wider:], width)]
        if isinstance(flat, FakeTensor):
            parts = [(_narrow(codes, layout.elements, width), words, flat, width)]
        for part in parts:
            groupquant.encode_(*part, size, fresh_seed(flat), self.stochastic)
        return codes, words

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return elements; their bits follow from the codes, which a recomputation may have made with other bits."""
        (codes, words), size, dtype = parts, self.group_size, layout.dtype
        width = codes.numel() * 8 // layout.elements
        wider = (codes.numel() - bitpack.packed_bytes(layout.elements, width)) * 8
        if not wider:
            return groupquant.decode(codes, words, width, size, start, count, dtype)
        if isinstance(codes, FakeTensor):
            codes = _narrow(codes, layout.elements, width)
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

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the decoded tensor; where nothing sees operators, whole bits are decoded at once."""
        codes, words = parts
        if is_watched() or not type(codes) is type(words) is Tensor or not (codes.is_cpu or codes.is_cuda):
            return super().unpack(parts, layout)
        sizes = codes.numel(), words.numel(), self.group_size
        decode = _decoder(*sizes, layout.shape, layout.order, layout.dtype, codes.device)
        if decode is None:
            return super().unpack(parts, layout)
        return decode(codes, words) if layout.order is None else layout.laid_out(decode(codes, words))

    def whole(self, parts: Parts, layout: Layout) -> tuple[Tensor, int] | None:
        """Return the codes, and the bits that each of them has; None if some have more than others.

        Fake codes of average bits are those of whole bits, as in :meth:`decode`.
        """
        codes, words = parts
        if isinstance(codes, FakeTensor):
            codes = _narrow(codes, layout.elements, codes.numel() * 8 // layout.elements)
        width = _whole_bits(codes.numel(), words.numel(), self.group_size, layout.elements)
        return None if width is None else (codes, width)

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return the parts of a tensor."""
        parts = self.encode(flat, layout)
        if site.watched:
            site.ranges = as_usual(groupquant.ranges(parts[1]).square().sum(), self.group_size, self.usual)
        return parts

    def planned(self, x: Tensor) -> Encode | None:
        """Return a function that encodes whole bits of tensors without gaps."""
        width, wider = self.division(Layout.of(x))
        # a tensor with gaps has to be copied into memory order first
        if wider or x.dtype == torch.float64 or flat_of(x).data_ptr() != x.data_ptr():
            return None
        return groupquant.encoder(x, width, self.group_size, self.stochastic)

    def division(self, layout: Layout) -> tuple[int, int]:
        """Return the smaller number of bits, and how many elements in front, in whole groups, have one bit more."""
        width = int(self.width)
        if width == self.width:
            return width, 0
        count, size = layout.elements, self.group_size
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
        """Return the average bits of a code."""
        width, wider = self.division(layout)
        return width + wider / layout.elements


@dataclass(frozen=True)
class OneGroup(Groups):
    """Codes with the same bits in one group, in memory order; parts are codes and one word."""

    def planned(self, x: Tensor) -> None:
        """Return None: one group is encoded by operators of torch."""

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the decoded tensor."""
        return GroupCodec.unpack(self, parts, layout)

    def encode(self, flat: Tensor, layout: Layout) -> Parts:
        """Return the parts of a tensor."""
        return groupquant.encode_in_one(flat, int(self.width), fresh_seed(flat), self.stochastic)

    def decode(self, parts: Parts, layout: Layout, start: int, count: int) -> Tensor:
        """Return elements; their bits follow from the codes."""
        codes, word = parts
        return groupquant.decode_in_one(codes, word, codes.numel() * 8 // layout.elements, start, count, layout.dtype)

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the codes, and 4."""
        return bitpack.packed_bytes(layout.elements, int(self.width)) + 4

    def bits(self, layout: Layout) -> float:
        """Return the bits of a code."""
        return self.width


@functools.lru_cache(maxsize=4096)
def _decoder(
    size: int,
    words: int,
    group_size: int,
    shape: torch.Size,
    order: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return what decodes codes of so many bytes and so many words in memory order; None if their bits are no number.

    A recomputation may have made them, with other bits than those of the first forward pass. The arguments are those of
    a layout one by one, which are hashed and compared faster.
    """
    count = shape.numel()
    width = _whole_bits(size, words, group_size, count)
    if width is None or dtype is torch.float64:  # for which there is no kernel
        return None
    return groupquant.decoder(shape if order is None else (count,), dtype, width, group_size, device)


def _whole_bits(size: int, words: int, group_size: int, count: int) -> int | None:
    """Return how many bits each of ``count`` elements has in codes of so many bytes; None if that is no number."""
    width = size * 8 // count if count else 0
    is_whole = width and size == bitpack.packed_bytes(count, width) and words == -(-count // group_size)
    return width if is_whole else None


def _narrow(codes: Tensor, count: int, width: int) -> Tensor:
    """Return so many of fake codes of average bits as whole bits take.

    Real steps allocate whole bits to most tensors. A simulation allocates none: every tensor has the average, and its
    bytes, but runs the one operator of whole bits, not the two of a fraction.
    """
    return codes[: bitpack.packed_bytes(count, width)]


def as_usual(squares: Tensor, group_size: int, usual: int) -> Tensor:
    """Convert sums over groups of a size to sums over groups of the usual size."""
    return squares if group_size == usual else squares * (group_size / usual)
