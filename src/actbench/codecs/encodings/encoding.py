"""What an encoding is, and how numbers are rounded to whole ones and to float formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from actbench.ops.arguments import DTYPES
from actbench.ops.noise import random_words
from actbench.results.records import Data
from actbench.spec import shortest

Parts = tuple[Tensor, ...]
Rounding = Literal["nearest", "stochastic"]


class Encoding(Data):
    """A number format as a pair of functions, with its parameters as fields; what decoding needs is in the parts.

    Elements are taken in the order of ``x.flatten()``, whatever the strides. A value that is not finite stays one, or
    makes NaN of its group or of its tensor; it never becomes a number. What is finite stays so up to :meth:`largest`.

    Class attributes that an encoding gives:
        name: How it is called in specifications.
        summary: One line for a reader.
        paper: Where the format comes from; empty for what has no paper.
        positional: The field that the value after the colon fills; None when it takes none.
        stored: False for what only simulates: its part is a tensor of the type that came in, and its bits are counted.
        fixed_rate: Whether :meth:`packed_bytes` is exact; otherwise it is an upper bound, and the values decide.
        noise_bits: Of the noise of each element where rounding is stochastic; element i has number i of
            :func:`actbench.ops.noise.lanes`.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    positional: ClassVar[str | None] = None
    stored: ClassVar[bool] = True
    fixed_rate: ClassVar[bool] = True
    noise_bits: ClassVar[int] = 16

    @property
    def unit(self) -> int | None:
        """Elements after which the format begins afresh, bytes and words of noise included.

        A part that begins and ends at multiples of it is encoded as it is in the whole. None where there is no such
        number: statistics are of all elements.
        """
        return None

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return the tensors that x is stored as.

        Args:
            x: float32, float16, bfloat16 or float64, of any shape and strides.
            seed: Of the noise of stochastic rounding: a 0-d int64 tensor on the CPU.

        Raises:
            ValueError: An argument is not as above.
        """
        raise NotImplementedError

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the contiguous tensor of a shape and a float type that parts stand for."""
        raise NotImplementedError

    def half_steps(self, parts: Parts, count: int) -> Tensor | None:
        """Return half of the least distance of two codes of each element's group, float32 (count,).

        What is decoded to less than that may have been anything up to it. None where it is too small to matter.
        """
        return None

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of all parts of a tensor of a shape and type, by arithmetic alone."""
        raise NotImplementedError

    def largest(self, dtype: torch.dtype) -> float:
        """Return the largest magnitude that comes back finite in its own type, whatever else is beside it.

        It is a number of that type, of float32 for float64, and at most the largest of float32. Where all values of a
        tensor are within it none becomes infinite or NaN; one above it may, and may take its group or its tensor along.
        """
        return at_most(torch.finfo(torch.float32).max, dtype)

    def counted_bits(self, x: Tensor, seed: Tensor) -> float | None:
        """Return the bits per element that the authors count for x; None where parts are really stored."""
        return None

    @property
    def spec(self) -> str:
        """The shortest specification that builds this encoding: ``NAME[:VALUE][,key=value…]``."""
        return shortest(self.name, self.positional, self)


def flat(x: Tensor) -> Tensor:
    """Return the elements of a float tensor as a contiguous vector, apart from the graph.

    Raises:
        ValueError: It is of no float type, or not strided.
    """
    if x.dtype not in DTYPES or x.layout != torch.strided:
        raise ValueError(f"an encoding takes strided tensors of {DTYPES}, found {x.dtype} of layout {x.layout}")
    return x.detach().reshape(-1).contiguous()


def within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in a type, the largest of it in place of an overflow: only NaN stays what is no number."""
    limit = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp(-limit, limit).to(dtype)


def at_most(bound: float, dtype: torch.dtype) -> float:
    """Return the largest number of a type that is not above a positive bound; one of float32 for float64."""
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    fraction, exponent = math.frexp(bound)
    step = info.eps / 2  # of fractions, which are from 1/2 to 1
    return min(math.ldexp(math.floor(fraction / step) * step, exponent), info.max)


def parts_bytes(parts: Parts) -> int:
    """Return the bytes that parts hold."""
    return sum(part.nbytes for part in parts)


def noise_unit(rounding: Rounding, noise_bits: int) -> int:
    """Return the elements that share a word of noise; 1 where there is none."""
    return 64 // noise_bits if rounding == "stochastic" else 1


def lanes(seed: Tensor, count: int, bits: int, device: torch.device) -> Tensor:
    """Return the first ``count`` numbers of :func:`actbench.ops.noise.lanes`, also on fake tensors."""
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
    """A float type that is narrower than float32 in its exponent too; ``least_exponent`` is that of a normal number."""

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
    """Return mean and deviation, 0-d, of two or more float32 or float64 values (n,); a deviation of 0 becomes 1.

    ``statistics`` are as of :class:`~actbench.codecs.encodings.simulated.SmaqSimulated`; ``samples`` is how many
    elements ``sample`` looks at, at most n.
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
