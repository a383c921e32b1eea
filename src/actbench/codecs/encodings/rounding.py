"""Rounding to whole numbers and to float formats, without bias where it is stochastic, by noise from a counter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actbench.ops.words import random_words


def lanes(seed: Tensor, count: int, bits: int, device: torch.device) -> Tensor:
    """Return the first ``count`` numbers of :func:`actbench.ops.noise.lanes`, also on fake tensors.

    Args:
        seed: 0-d int64 tensor on the CPU.
        count: How many.
        bits: Of each: 1, 2, 4, 8, 16 or 32.
        device: Where to make them.

    Returns:
        (count,) int64 in ``0 .. 2**bits - 1``.
    """
    words = random_words(seed, 0, -(-count * bits // 64), device)
    shifts = torch.arange(0, 64, bits, device=device)
    cut: Tensor = ((words[:, None] >> shifts) & ((1 << bits) - 1)).flatten()[:count]
    return cut


def stochastic(places: Tensor, seed: Tensor) -> Tensor:
    """Return a whole number beside each number, the upper one with the chance of its fractional part.

    Chances are multiples of 2**-23, so the mean is off by at most 2**-24. Whole numbers, NaN and infinities stay.
    """
    below = places.floor()
    noise = (lanes(seed, places.numel(), 32, places.device) >> 9).float()
    chance = ((noise + 0.5) * 2.0**-23).view(places.shape)
    return below + (chance < places - below)


@dataclass(frozen=True)
class FloatFormat:
    """A float type that is narrower than float32 in its exponent too.

    Attributes:
        dtype: The type.
        fraction_bits: Bits of the fraction.
        least_exponent: Of a normal number.
    """

    dtype: torch.dtype
    fraction_bits: int
    least_exponent: int

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max

    @property
    def least(self) -> float:
        """The least number above zero."""
        return float(2.0 ** (self.least_exponent - self.fraction_bits))

    def nearest(self, x: Tensor) -> Tensor:
        """Return the nearest numbers of the format, ties to even, as torch converts."""
        return x.to(self.dtype)

    def stochastic(self, x: Tensor, seed: Tensor) -> Tensor:
        """Return numbers of the format whose mean over seeds is x, float32 of any shape; subnormal numbers as well."""
        exponent = torch.frexp(x).exponent - 1
        quantum = torch.ldexp(torch.ones_like(x), exponent.clamp(min=self.least_exponent) - self.fraction_bits)
        return (stochastic(x / quantum, seed) * quantum).to(self.dtype)


FP16 = FloatFormat(torch.float16, 10, -14)
E4M3 = FloatFormat(torch.float8_e4m3fn, 3, -6)
E5M2 = FloatFormat(torch.float8_e5m2, 2, -14)


def bf16_stochastic(x: Tensor, seed: Tensor) -> Tensor:
    """Return bfloat16 numbers whose mean over seeds is x, float32 of any shape.

    Adds 16 random bits below the fraction and cuts: exact, also for subnormal numbers. What is beyond the largest
    number may become infinite, as in torch's conversion.
    """
    noise = lanes(seed, x.numel(), 16, x.device).to(torch.int32).view(x.shape)
    cut = ((x.view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)
