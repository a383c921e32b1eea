"""Rounding to whole numbers and to float formats, and what is asked about a tensor before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from actbench.ops.noise import random_words


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


Statistics = Literal["full", "sample", "range"]


def moments(values: Tensor, statistics: Statistics, samples: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation, 0-d tensors; a deviation of 0 becomes 1.

    Args:
        values: (n,) float32 or float64, n at least 2.
        statistics: Which; see :class:`~actbench.codecs.encodings.simulated.SmaqSimulated`.
        samples: How many elements ``sample`` looks at, at most n.
        seed: Of the choice of samples.
    """
    match statistics:
        case "full":
            deviation, mean = torch.std_mean(values)
        case "sample":
            deviation, mean = torch.std_mean(_sampled(values, samples, seed), correction=0)
        case "range":
            least, most = values.aminmax()
            mean = torch.std_mean(values)[1]  # a sum, as of mean(), could overflow
            deviation = (most - least) / math.sqrt(2 * math.log(values.numel()))
    return mean, torch.where(deviation == 0, 1.0, deviation)


def _sampled(values: Tensor, samples: int, seed: Tensor) -> Tensor:
    """Return different elements at random: the first of a permutation of all, dear as it is, as the authors do."""
    words = random_words(seed, values.numel(), values.numel(), values.device)  # behind those that rounding uses
    return values[words.argsort(stable=True)[:samples]]
