"""SmaQ's way with the output of a batch norm: the layer's scale and shift are taken off before it is quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.codecs.encodings.simulated import SmaqSimulated
from actbench.codecs.encodings.statistics import moments


def simulate_normalized(
    encoding: SmaqSimulated, x: Tensor, seed: Tensor, weight: Tensor, bias: Tensor, *, scalar: bool = False
) -> Tensor:
    """Return what SmaQ leaves of the output of a batch norm.

    Per channel ``(x - bias) / weight`` is quantized and scaled back. Mean and deviation are still those of x, as the
    authors have it, so that z is standardized only where weight is 1 and bias is 0. A weight of 0, by which they
    divide, counts as 1.

    Args:
        encoding: Bits, thresholds, statistics and rounding.
        x: (N, C, ...) of a float type.
        seed: 0-d int64 tensor on the CPU.
        weight: (C,), of the batch norm.
        bias: (C,), of the batch norm.
        scalar: Whether the means of weight and bias stand for all channels.

    Returns:
        A contiguous tensor of the shape and type of x.

    Raises:
        ValueError: Weight and bias do not have one number for each channel.
    """
    if x.dim() < 2 or weight.shape != (x.shape[1],) or bias.shape != weight.shape:
        found = f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(bias.shape)}"
        raise ValueError(f"x must be (N, C, ...), weight and bias (C,); found {found}")
    if x.numel() < encoding.min_size:
        return x.detach().clone()
    wide = x.detach() if x.dtype == torch.float64 else x.detach().float()
    places = (1, -1) + (1,) * (x.dim() - 2)
    scale, shift = ((part.detach().to(wide.dtype)) for part in (weight, bias))
    if scalar:
        scale, shift = scale.mean().expand_as(scale), shift.mean().expand_as(shift)
    scale, shift = torch.where(scale == 0, 1.0, scale).view(places), shift.view(places)
    mean, deviation = moments(wide.flatten(), encoding.statistics, encoding.samples, seed)
    bare = ((wide - shift) / scale).contiguous()
    return (encoding.quantized(bare, mean, deviation, seed) * scale + shift).to(x.dtype)
