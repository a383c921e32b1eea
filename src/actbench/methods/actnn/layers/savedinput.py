"""Saves the packed input of a layer, and decodes it in the backward pass, whole or in pieces of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from actbench.methods.actnn.layers.ingraph import InGraph
from actbench.ops.bitpack import pack_codes, packed_bytes, unpack_codes
from actbench.ops.library import DTYPES
from actbench.packing import Packed, SavedTensors, SiteState
from actbench.packing.codecs import OnHost
from actbench.packing.layout import as_it_lay, in_order, memory_order
from actbench.packing.precision import wide

PIECE = 2**21
"""The approximate number of elements of a piece."""


def needs_codes(x: Tensor, inplace: bool = False) -> bool:
    """Return whether a function must pack a code of x; else torch's own function will do.

    A leaf that would be overwritten in place is left to torch, which refuses it.
    """
    if not (torch.is_grad_enabled() and x.requires_grad) or (inplace and x.is_leaf):
        return False
    return x.layout == torch.strided and x.dtype in DTYPES and not x.is_nested


def packed(values: Tensor, bits: int, order: list[int] | None) -> Tensor:
    """Return small numbers as packed codes, uint8 ``(ceil(values.numel() * bits / 8),)``.

    Args:
        values: uint8 below ``2**bits``, or bool with one bit.
        bits: 1 to 8.
        order: The order in which the dimensions are packed; None for their own order.
    """
    codes: Tensor = pack_codes(in_order(values, order).view(-1).view(torch.uint8), bits)
    return codes


def unpacked(codes: Tensor, bits: int, first: int, last: int) -> Tensor:
    """Return codes ``first`` to ``last - 1`` as uint8; ``first`` must begin at a whole byte."""
    start = first * bits // 8
    found: Tensor = unpack_codes(codes[start : start + packed_bytes(last - first, bits)], bits, last - first)
    return found


def pieces(rows: int, row_size: int = 1) -> Iterator[tuple[int, int]]:
    """Yield first and past-last row of each piece; its codes begin at a whole byte, whatever their bits."""
    # the fewest rows whose codes fill whole bytes
    aligned = 8 // math.gcd(8, row_size)
    step = max(1, PIECE // max(1, row_size * aligned)) * aligned
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


class Compressed(InGraph):
    """A layer that packs its input at a site, with the packer of the whole model."""

    packer: SavedTensors
    site: SiteState

    def extra_repr(self) -> str:
        """Add the bits of the input to the layer's own text."""
        said = super().extra_repr()
        return f"{said}, kept in {self.site.bits:g} bits" if not self.packer.codec.exact else said


def is_differentiated(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether a gradient of any of these is needed; complex tensors are left to torch."""
    if not torch.is_grad_enabled() or x.is_complex() or (weight is not None and weight.is_complex()):
        return False
    return x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)


Sums = tuple[Tensor | None, ...]

WHOLE: Final = slice(None)
"""The one piece of a batch that is not cut."""
_WHOLE: Final = (WHOLE,)


class SavedInput(NamedTuple):
    """The packed input of a layer, or None, and the most pieces of the batch that it may be cut into."""

    packed: Packed | None
    chunk: int

    def pieces(self) -> Sequence[slice]:
        """Return the rows (entries of dimension 0) of each piece; one piece if single rows cannot be decoded."""
        assert self.packed is not None
        if self.chunk == 1 or not self.packed.divisible:
            return _WHOLE
        rows = self.packed.layout.shape[0]
        count = min(self.chunk, rows)
        return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)] if count > 1 else _WHOLE

    def rows(self, piece: slice) -> Tensor:
        """Return the input's rows of a piece."""
        assert self.packed is not None
        return self.packed.unpack() if piece is WHOLE else self.packed.rows(piece.start, piece.stop)


def rows_of_piece(tensor: Tensor, piece: slice) -> Tensor:
    """Return the rows of a piece of another tensor of the batch; to cut nothing off takes as long as a product."""
    return tensor if piece is WHOLE else tensor[piece]


_autograd: Any = torch._C._autograd


def save(ctx: Any, packed: Packed | None, layer: Compressed, *others: Tensor | None, by_row: bool = True) -> None:
    """Save other tensors and the packed input of a layer, or None if the backward pass does not need it.

    Parts are saved, not put on ``ctx``: autograd frees them after backward, and under non-re-entrant checkpointing they
    come from the recomputation. Hooks around the layer do not pack the ``others``: weights and statistics. With
    ``by_row`` the backward pass can be cut into pieces of the batch.
    """
    site = layer.site
    if packed is None:
        site.owner, site.elements = None, 0
    ctx.packed, ctx.site, ctx.by_row, ctx.others = None, site, by_row, len(others)
    if _autograd._top_saved_tensors_default_hooks(True) is not None:  # there are hooks
        layer.packer.exclude.add(tensor for tensor in others if tensor is not None)
    if packed is None:
        ctx.save_for_backward(*others)
    else:
        ctx.packed = packed.codec, packed.layout
        ctx.save_for_backward(*others, *packed.parts)


def load(ctx: Any, grad: Tensor) -> tuple[SavedInput, Sequence[Any]]:
    """Return the saved input and the other saved tensors, for the gradient of the output."""
    tensors, others, packed, site, size_bytes = ctx.saved_tensors, ctx.others, None, ctx.site, 0
    if ctx.packed is not None:
        codec, layout = ctx.packed
        packed = Packed(codec, layout, tensors[others:])
        if isinstance(codec, OnHost):
            packed = packed.fetched()  # once, for all pieces
        if site.pipeline_threshold is not None:
            size_bytes = grad.nbytes + layout.elements * layout.dtype.itemsize
    chunk = site.pieces(size_bytes) if ctx.by_row and (site.pipeline_threshold is not None or site.chunk > 1) else 1
    return SavedInput(packed, chunk), tensors[:others]


def summed(pieces: Sequence[slice], compute: Callable[[slice], Sums]) -> Sums:
    """Return the sums of ``compute`` over all pieces; half types are summed in float32.

    All but the sums is freed before the next piece is computed.
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


class RowByRow:
    """A tensor that is written piece by piece, with the memory layout of its first piece."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.whole: Tensor | None = None

    def write(self, piece: slice, values: Tensor) -> None:
        """Write the rows of a piece."""
        self.room(piece, values)[:] = values

    def room(self, piece: slice, like: Tensor) -> Tensor:
        """Return the memory for the rows of a piece, with type and row shape of ``like``."""
        if self.whole is None:
            order = memory_order(like)
            shape = (self._rows, *like.shape[1:])
            dims = range(len(shape)) if order is None else order
            self.whole = as_it_lay(like.new_empty([shape[dim] for dim in dims]), order)
        return self.whole[piece]
