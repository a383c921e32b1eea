"""The derivative of a gated unit from its output and a bit, in memory that the caller gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actbench.codecs.gated import Inversion

Take = Callable[[int, torch.dtype], Tensor]
"""Gives an uninitialised tensor of so many elements of a type."""


def wide_type(y: Tensor) -> torch.dtype:
    """Return the type in which derivatives are found: float64 for a y in float64, otherwise float32."""
    return torch.float64 if y.dtype == torch.float64 else torch.float32


def bytes_meanwhile(dtype: torch.dtype) -> int:
    """Return the bytes for each element that :func:`times_slope` takes in this type."""
    return 3 * dtype.itemsize + torch.int32.itemsize + torch.uint8.itemsize


def times_slope(grad: Tensor, y: Tensor, bits: Tensor, slopes: Tensor, inversion: Inversion, take: Take) -> Tensor:
    """Return a gradient times the derivative at the x with ``f(x) = y`` on the side of the minimum that the bit says.

    Args:
        grad: ``(n,)`` of a float type.
        y: ``(n,)`` of a float type.
        bits: ``(ceil(n / 8),)`` uint8, the first element's lowest; 1 to the right of the minimum.
        slopes: The left and the right branch of the inversion, float32 ``(2, cells + 1)``.
        inversion: What the slopes are of.
        take: Gives the memory for what is found meanwhile, and for the result.

    Returns:
        ``(n,)`` of :func:`wide_type`; NaN where y or the gradient is.
    """
    count, dtype, cells = len(y), wide_type(y), slopes.shape[1] - 1
    first, second, third = (take(count, dtype) for _ in range(3))
    right = _flags(bits, take(8 * len(bits), torch.uint8))[:count].view(torch.bool)
    wide = y if y.dtype == dtype else third.copy_(y)
    place = _place(wide, right, inversion, first, second).nan_to_num_(0.0).clamp_(0, 1).mul_(cells)
    cell = torch.floor(place, out=second).clamp_(max=cells - 1)
    share = place.sub_(cell)
    index = take(count, torch.int32).copy_(cell).add_(right, alpha=cells + 1)
    flat = slopes.reshape(-1).to(dtype)
    low = torch.index_select(flat, 0, index, out=second)
    high = torch.index_select(flat, 0, index.add_(1), out=third)
    slope = low.lerp_(high, share).masked_fill_(torch.ne(y, y, out=right), float("nan"))
    return slope.mul_(third.copy_(grad))  # of one type: operators on two take memory of their own


def _flags(bits: Tensor, out: Tensor) -> Tensor:
    """Return bits as bytes, the lowest first."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    torch.bitwise_right_shift(bits[:, None], places, out=out.view(-1, 8))
    return out.bitwise_and_(1)


def _place(y: Tensor, right: Tensor, inversion: Inversion, first: Tensor, second: Tensor) -> Tensor:
    """Return in ``first`` where an output lies on its branch, 0 at the minimum and 1 at the end."""
    ratio = torch.div(y, inversion.least, out=first).clamp_(0, 1)
    root = torch.neg(ratio, out=second).add_(1).sqrt_().add_(1)
    on_left = ratio.div_(root).sqrt_().neg_().add_(1)
    on_right = torch.sub(y, inversion.least, out=second).clamp_(min=0).sqrt_().div_(inversion.reach)
    return torch.where(right, on_right, on_left, out=first)
