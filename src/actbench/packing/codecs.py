"""Codecs: the number formats of tensors that wait for the backward pass.

Autograd holds and frees the parts, which are tensors. Under non-re-entrant checkpointing the parts come from the
recomputation, and codec and layout from the first forward pass. So codec and layout must follow from the shape of the
tensor and from settings, never from its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from actbench.ops import bitpack
from actbench.ops.library import DTYPES
from actbench.packing.hostoffload import HostOffload
from actbench.packing.layout import Layout, memory_order
from actbench.packing.sitestate import SiteState

Parts = tuple[Tensor, ...]
Encode = Callable[[Tensor, Tensor], tuple[Parts, int | None]]
"""Makes the parts of a tensor, of one known form, with a seed, and counts what :meth:`Codec.lost` looks for; None where
only a look tells.
"""

SMALLEST = 64
"""A tensor with fewer elements stays whole: it would gain less than torch's allocator rounds up."""


_PACKED = frozenset((*DTYPES, torch.bool))


class Codec:
    """A number format, which makes parts of a tensor and the tensor of its parts.

    A codec may hold only settings, from which :meth:`at` chooses a codec for each tensor. The defaults are those of a
    format that packs floating-point tensors as a whole.

    Class attributes:
        exact: Whether the decoded tensor equals the packed one bit for bit.
        drops: Whether elements are dropped, and decode to 0. Hooks leave whole what backward passes divide by.
    """

    exact: ClassVar[bool] = False
    drops: ClassVar[bool] = False

    @property
    def compiles(self) -> bool:
        """Whether hooks may pack by the format in graphs of ``torch.compile``: it keeps nothing at a site."""
        return False

    def why_not(self, x: Tensor) -> str | None:
        """Return why the format cannot take a tensor, or None."""
        if x.dtype not in _PACKED:
            return f"{x.dtype} is not a floating-point type"
        return "too small to gain" if x.numel() < SMALLEST else None

    def at(self, x: Tensor, site: SiteState) -> Codec:
        """Return the codec that packs a tensor at a site; it follows from shape and settings, never from values."""
        return FLAGS if x.dtype == torch.bool else self

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return the parts of a tensor whose elements ``flat`` are in memory order.

        The site has the bits of the tensor, and its ranges are noted there if it is watched.
        """
        raise NotImplementedError

    def planned(self, x: Tensor) -> Encode | None:
        """Return a function of a tensor and a seed that makes the parts of plain tensors of the form of x.

        It may be called while nothing sees operators (:func:`actbench.ops.library.is_watched`) and the site is not
        watched. None if there is no faster way than :meth:`pack`.
        """
        return None

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the tensor, with this layout."""
        raise NotImplementedError

    def divisible(self, layout: Layout) -> bool:
        """Return whether single rows (entries of dimension 0) can be unpacked without the others."""
        return False

    def rows(self, parts: Parts, layout: Layout, first: int, last: int) -> Tensor:
        """Return rows ``first`` to ``last - 1``; a tensor that is not divisible is unpacked as a whole first."""
        return self.unpack(parts, layout)[first:last]

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of all parts of a tensor, in closed form."""
        raise NotImplementedError

    def bits(self, layout: Layout) -> float:
        """Return the average bits of an element, without the bytes of groups."""
        return 8 * self.packed_bytes(layout) / layout.elements

    def lost(self, flat: Tensor, parts: Parts) -> str | None:
        """Return which values of a tensor would decode to NaN or make others NaN, or None.

        The elements may have any order. On a device, a look at ``flat`` waits for it.
        """
        return None

    def coarser(self, x: Tensor, bits: int, row: int) -> Tensor:
        """Return a float tensor rounded to this many bits, contiguous; a codec without bits returns it whole.

        Args:
            x: Any shape and strides.
            bits: 1 to 8.
            row: Elements of a row that shares no group with another; 0 if rows do not matter.
        """
        return x


class OfRows(Codec):
    """A number format of rows, the last dimension, which must be the innermost in memory."""

    def why_not(self, x: Tensor) -> str | None:
        """Return why the format cannot take a tensor, or None."""
        order = memory_order(x)
        if order is not None and order[-1] != x.dim() - 1:
            return "its last dimension is not the innermost in memory"
        return super().why_not(x)


class Packed(NamedTuple):
    """A packed tensor that waits for the backward pass; without its parts this holds no tensor."""

    codec: Codec
    layout: Layout
    parts: Parts

    def unpack(self) -> Tensor:
        """Return the tensor."""
        return self.codec.unpack(self.parts, self.layout)

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows ``first`` to ``last - 1`` of the tensor."""
        return self.codec.rows(self.parts, self.layout, first, last)

    def fetched(self) -> Packed:
        """Return the packed tensor with its parts on the tensor's device."""
        if not isinstance(self.codec, OnHost):
            return self
        return Packed(self.codec.inner, self.layout, self.codec.fetched(self.parts))

    @property
    def bits(self) -> float:
        """Average bits of an element."""
        return self.codec.bits(self.layout)

    @property
    def divisible(self) -> bool:
        """Whether single rows can be unpacked without the others."""
        return self.codec.divisible(self.layout)


@dataclass(frozen=True)
class Identity(Codec):
    """All bytes of a tensor of any type; the part is a vector of its elements in memory order."""

    exact: ClassVar[bool] = True

    def why_not(self, x: Tensor) -> str | None:
        """Return None: the codec takes every tensor."""
        return None

    def at(self, x: Tensor, site: SiteState) -> Codec:
        """Return this codec."""
        return self

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return the elements."""
        return (flat,)

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return a view of the part."""
        return layout.laid_out(parts[0])

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the elements."""
        return layout.elements * layout.dtype.itemsize


@dataclass(frozen=True)
class Unpacked(Identity):
    """The tensor itself, unpacked, as the only part."""

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the tensor."""
        return parts[0]

    def divisible(self, layout: Layout) -> bool:
        """Return True: rows are views."""
        return True


def unpacked(x: Tensor) -> Packed:
    """Return a tensor in the form of a packed one, but unpacked."""
    return Packed(Unpacked(), Layout.of(x), (x,))


@dataclass(frozen=True)
class Flags(Codec):
    """Booleans, one bit each, in memory order; the part is the packed bits."""

    exact: ClassVar[bool] = True

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return uint8 ``(ceil(elements / 8),)``."""
        return (bitpack.pack_codes(flat.view(torch.uint8), 1),)

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the tensor."""
        return layout.laid_out(bitpack.unpack_codes(parts[0], 1, layout.elements).view(torch.bool))

    def packed_bytes(self, layout: Layout) -> int:
        """Return ``ceil(elements / 8)``."""
        return bitpack.packed_bytes(layout.elements, 1)

    def bits(self, layout: Layout) -> float:
        """Return 1."""
        return 1.0


FLAGS = Flags()


@dataclass(frozen=True)
class Around(Codec):
    """A codec around the codec of the parts."""

    inner: Codec

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the parts."""
        return self.inner.packed_bytes(layout)

    def bits(self, layout: Layout) -> float:
        """Return the bits of the inner codec."""
        return self.inner.bits(layout)


@dataclass(frozen=True)
class OnHost(Around):
    """Parts that wait in host memory; ``offload`` brings them back to the device."""

    device: torch.device
    offload: HostOffload = field(repr=False)

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Bring the parts back and return the tensor."""
        return self.inner.unpack(self.fetched(parts), layout)

    def rows(self, parts: Parts, layout: Layout, first: int, last: int) -> Tensor:
        """Bring the parts back and return rows."""
        return self.inner.rows(self.fetched(parts), layout, first, last)

    def fetched(self, parts: Parts) -> Parts:
        """Return the parts on their device."""
        return self.offload.back(parts, self.device)


@dataclass(frozen=True)
class Repeated(Around):
    """A tensor that repeats elements by strides of 0; the parts hold each element ``once``."""

    once: Layout

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the tensor."""
        return self.inner.unpack(parts, self.once).expand(layout.shape)

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the parts."""
        return self.inner.packed_bytes(self.once)

    def bits(self, layout: Layout) -> float:
        """Return the bits of an element that is counted once."""
        return self.inner.bits(self.once)


@dataclass(frozen=True)
class Logarithms(Around):
    """Logarithms of probabilities; the parts are those of the probabilities, which backward computes from them.

    The error of a packed logarithm would become a factor of the probability, which does not average out. A masked class
    has the logarithm minus infinity, which no group of codes can hold, but the probability 0, which is exact.
    """

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the tensor; minus infinity where a probability was 0 or was rounded to 0."""
        return logarithms(self.inner.unpack(parts, layout))


def logarithms(powers: Tensor) -> Tensor:
    """Replace probabilities by their logarithms; rounding may have made a probability negative."""
    return powers.clamp_(min=0).log_()
