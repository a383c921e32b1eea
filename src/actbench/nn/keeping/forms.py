"""The forms in which a tensor waits for the backward pass.

A form is everything about a kept tensor that is not a tensor; its parts are the tensors, which autograd holds and
frees. Under non-re-entrant checkpointing the parts come from the recomputation and the form from the first forward,
so that a form must follow from the shape of the tensor and from settings, never from its values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from actbench.nn.keeping import fractions
from actbench.nn.layout import as_it_lay, in_order, memory_order
from actbench.ops import bitpack, groupquant

Parts = tuple[Tensor, ...]


class Form(Protocol):
    """How parts are made a tensor again.

    Attributes:
        shape: Of the tensor.
        dtype: Of the tensor when it was kept.
        bits: Bits an element is kept in, on average, without what belongs to a group.
        divisible: Whether single rows (entries of dimension 0) can be had without the others.
    """

    @property
    def shape(self) -> torch.Size: ...  # noqa: D102
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def bits(self) -> float: ...  # noqa: D102
    @property
    def divisible(self) -> bool: ...  # noqa: D102

    def restore(self, parts: Parts) -> Tensor:
        """Return the tensor, laid out in memory as it was."""

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return rows ``first`` to ``last - 1``; all are made first where the form is not divisible."""

    def seen_as(self, x: Tensor) -> Form:
        """Return the form of another view of the same memory, with the same parts."""


class Kept(NamedTuple):
    """A tensor as it is kept."""

    form: Form
    parts: Parts


@dataclass(frozen=True)
class AsItIs:
    """The tensor itself."""

    shape: torch.Size
    dtype: torch.dtype
    divisible: bool = True

    @property
    def bits(self) -> float:
        """Bits of its type."""
        return 8.0 * self.dtype.itemsize

    def restore(self, parts: Parts) -> Tensor:
        """Return the tensor."""
        return parts[0]

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return a view."""
        return parts[0][first:last]

    def seen_as(self, x: Tensor) -> AsItIs:
        """Return the form of a tensor that is kept as it is."""
        return AsItIs(x.shape, x.dtype)


@dataclass(frozen=True)
class Whole:
    """All bytes of a tensor, in the order of its memory; the part is a vector of its elements.

    Attributes:
        shape: Of the tensor.
        dtype: Of the tensor.
        order: Its dimensions, widest stride first; None for contiguous.
    """

    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...] | None
    divisible: bool = False

    @property
    def bits(self) -> float:
        """Bits of its type."""
        return 8.0 * self.dtype.itemsize

    def restore(self, parts: Parts) -> Tensor:
        """Return the tensor."""
        return laid_out(parts[0], self.shape, self.order)

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return a view."""
        return self.restore(parts)[first:last]

    def seen_as(self, x: Tensor) -> Whole:
        """Return the form of another view."""
        return replace(self, shape=x.shape, order=order_of(x))


@dataclass(frozen=True)
class Flags:
    """Truth values, one bit each, in the order of the tensor's memory; the part is the packed bits.

    Attributes:
        shape: Of the tensor.
        order: Its dimensions, widest stride first; None for contiguous.
    """

    shape: torch.Size
    order: tuple[int, ...] | None
    dtype: torch.dtype = torch.bool
    bits: float = 1.0
    divisible: bool = False

    def restore(self, parts: Parts) -> Tensor:
        """Return the tensor."""
        flat = bitpack.unpack_codes(parts[0], 1, self.shape.numel()).view(torch.bool)
        return laid_out(flat, self.shape, self.order)

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return rows of the whole tensor."""
        return self.restore(parts)[first:last]

    def seen_as(self, x: Tensor) -> Flags:
        """Return the form of another view."""
        return replace(self, shape=x.shape, order=order_of(x))


@dataclass(frozen=True)
class Grouped:
    """Codes in groups that run through the tensor in the order of its memory; parts are codes and meta.

    Attributes:
        shape: Of the tensor.
        dtype: Of the tensor.
        order: Its dimensions, widest stride first; None for contiguous.
        width: Bits an element was to have on average, 1 to 8; of a fraction, groups in front have a bit more.
        group_size: Elements that share an offset and a scale.
    """

    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...] | None
    width: float
    group_size: int

    @property
    def bits(self) -> float:
        """Bits that a code has on average."""
        return fractions.mean_bits(self.shape.numel(), self.width, self.group_size)

    @property
    def divisible(self) -> bool:
        """Whether dimension 0 is outermost in memory."""
        return len(self.shape) > 0 and (self.order is None or self.order[0] == 0)

    def restore(self, parts: Parts) -> Tensor:
        """Return the decoded tensor."""
        return self._decoded(parts, 0, self.shape)

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return decoded rows."""
        if not self.divisible:
            return self.restore(parts)[first:last]
        row = math.prod(self.shape[1:])
        return self._decoded(parts, first * row, torch.Size((last - first, *self.shape[1:])))

    def seen_as(self, x: Tensor) -> Grouped:
        """Return the form of another view."""
        return replace(self, shape=x.shape, order=order_of(x))

    def _decoded(self, parts: Parts, start: int, shape: torch.Size) -> Tensor:
        flat = fractions.decode(parts, self.shape.numel(), self.group_size, self.dtype, start, shape.numel())
        return laid_out(flat, shape, self.order)


@dataclass(frozen=True)
class GroupedRows:
    """Codes whose width differs from row to row; parts are codes, meta and the widths, int32 ``(rows,)``.

    Attributes:
        shape: Of the tensor, whose dimension 0 is outermost in memory.
        dtype: Of the tensor.
        order: Its dimensions, widest stride first; None for contiguous.
        total_bits: Sum of the widths of all rows.
        group_size: Elements that share an offset and a scale.
    """

    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...] | None
    total_bits: int
    group_size: int

    @property
    def divisible(self) -> bool:
        """Whether dimension 0 is outermost in memory; another view of the memory may be of another order."""
        return self.order is None or self.order[0] == 0

    @property
    def bits(self) -> float:
        """Mean of the widths."""
        return self.total_bits / self.shape[0]

    def restore(self, parts: Parts) -> Tensor:
        """Return the decoded tensor."""
        return self._decoded(parts, 0, self.shape[0])

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return decoded rows."""
        if not self.divisible:
            return self.restore(parts)[first:last]
        return self._decoded(parts, first, last)

    def seen_as(self, x: Tensor) -> GroupedRows:
        """Return the form of another view with as many rows."""
        return replace(self, shape=x.shape, order=order_of(x))

    def _decoded(self, parts: Parts, first: int, last: int) -> Tensor:
        codes, meta, widths = parts
        shape = torch.Size((last - first, *self.shape[1:]))
        out = codes.new_empty((last - first, math.prod(self.shape[1:])), dtype=self.dtype)
        groupquant.decode_rows(codes, meta, widths, self.group_size, first, out)
        return laid_out(out, shape, self.order)


def order_of(x: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor in the order of its memory, widest stride first; None for contiguous."""
    order = memory_order(x)
    return None if order is None else tuple(order)


def flat_of(x: Tensor) -> Tensor:
    """Return the elements of a tensor in the order of its memory, apart from the graph; no copy where they lie so."""
    return in_order(x.detach(), memory_order(x)).view(-1)


def laid_out(flat: Tensor, shape: torch.Size, order: tuple[int, ...] | None) -> Tensor:
    """Return elements in the order of memory as a tensor of a shape whose dimensions lie in an order."""
    if order is None:
        return flat.view(shape)
    return as_it_lay(flat.view([shape[dim] for dim in order]), list(order))
