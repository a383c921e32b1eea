"""Dropout with torch's own random numbers that packs one bit an element.

On CUDA torch drops with one operator, ``native_dropout``, and saves its mask, one byte an element. On other devices, in
place and for whole channels torch multiplies by noise that is 0 or 1 / (1 - p), and saves the noise in the type of the
input. Output, generator and gradient are torch's, bit for bit; the backward pass multiplies too, so that an infinite
gradient at a dropped element gives NaN in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.methods.actnn.layers.savedinput import needs_codes, packed, pieces, unpacked
from actbench.packing import savedtensors
from actbench.packing.layout import as_it_lay, in_order, memory_order
from actbench.packing.refusals import first_order

aten = torch.ops.aten


class FusedDropout(torch.autograd.Function):
    """CUDA's operator, with its mask packed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        """Return the output; save uint8 ``(ceil(x.numel() / 8),)``."""
        output, kept = aten.native_dropout.default(x, p, True)
        ctx.p, ctx.order = p, memory_order(kept)
        codes = packed(kept, 1, ctx.order)
        savedtensors.packed(kept, codes)
        ctx.save_for_backward(codes)
        dropped: Tensor = output
        return dropped

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the operator's own gradient."""
        (codes,) = ctx.saved_tensors
        scale = 1.0 / (1.0 - ctx.p)

        def scaled(grad: Tensor, first: int, last: int) -> Tensor:
            kept = unpacked(codes, 1, first, last).view(torch.bool)
            product: Tensor = aten.native_dropout_backward.default(grad, kept, scale)
            return product

        return _piece_by_piece(scaled, grad, ctx.order), None


class NoisyDropout(torch.autograd.Function):
    """The product with noise; the backward pass makes the noise again from its bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, by_channel: bool, inplace: bool) -> Tensor:
        """Return the output; save a bit for each element, or for each channel (dimensions 0 and 1)."""
        noise = x.new_empty(_channels(x)) if by_channel else torch.empty_like(x)
        noise.bernoulli_(1 - p)
        ctx.p, ctx.by_channel, ctx.order = p, by_channel, memory_order(noise)
        codes = packed(noise != 0, 1, ctx.order)
        savedtensors.packed(noise, codes)
        ctx.save_for_backward(codes)
        # drawn and divided in two steps, as in aten/src/ATen/native/Dropout.cpp, for the same bits
        noise.div_(1 - p)
        if inplace:
            ctx.mark_dirty(x)
            return x.mul_(noise)
        return x * noise

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the product of the gradient and the noise."""
        (codes,) = ctx.saved_tensors

        def noise(first: int, last: int) -> Tensor:
            return unpacked(codes, 1, first, last).to(grad.dtype).div_(1 - ctx.p)

        if ctx.by_channel:
            shape = _channels(grad)
            return grad * noise(0, shape[0] * shape[1]).view(shape), None, None, None
        product = _piece_by_piece(lambda grad, first, last: noise(first, last).mul_(grad), grad, ctx.order)
        return product, None, None, None


def _channels(x: Tensor) -> tuple[int, ...]:
    return (x.shape[0], x.shape[1], *(1 for _ in x.shape[2:]))


def _piece_by_piece(function: Callable[[Tensor, int, int], Tensor], grad: Tensor, order: list[int] | None) -> Tensor:
    """Return ``function(piece, first, last)`` for all pieces of the flat gradient, in this layout."""
    lying = in_order(grad, order)
    flat, cuts = lying.view(-1), list(pieces(grad.numel()))
    if len(cuts) == 1:
        found = function(flat, *cuts[0])
    else:
        found = torch.empty_like(flat)
        for first, last in cuts:
            found[first:last] = function(flat[first:last], first, last)
    return as_it_lay(found.view(lying.shape), order)


def _drops(x: Tensor, p: float, training: bool, inplace: bool) -> bool:
    # these are the conditions of is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp
    return training and 0 < p < 1 and x.numel() > 0 and needs_codes(x, inplace)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    """Return ``F.dropout`` of the same arguments; ``ceil(input.numel() / 8)`` bytes are packed.

    If p is 0 or 1 torch's function runs, since it saves nothing then.
    """
    if not _drops(input, p, training, inplace):
        return F.dropout(input, p, training, inplace)
    output: Tensor
    fused = not inplace and input.is_cuda  # there torch drops with one operator
    output = FusedDropout.apply(input, p) if fused else NoisyDropout.apply(input, p, False, inplace)
    return output


def channel_dropout(dims: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    """Return ``F.dropout1d`` to ``F.dropout3d`` of the same arguments; ``ceil(N * C / 8)`` bytes are packed.

    An input without a batch dimension is left to torch.
    """
    exact: Callable[..., Tensor] = getattr(F, f"dropout{dims}d")
    if input.dim() != dims + 2 or not _drops(input, p, training, inplace):
        return exact(input, p, training, inplace)
    output: Tensor = NoisyDropout.apply(input, p, True, inplace)
    return output
