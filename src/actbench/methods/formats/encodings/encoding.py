"""The interface of encodings, and rounding to whole numbers and to float formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from actbench.model.data import Data
from actbench.model.spec import shortest
from actbench.ops import noise
from actbench.ops.library import DTYPES
from actbench.ops.rounding import lanes, stochastic

Parts = tuple[Tensor, ...]
Rounding = Literal["nearest", "stochastic"]


class Encoding(Data):
    """A number format: encode and decode, with parameters as fields. The parts hold all that decoding needs.

    Elements are in the order of ``x.flatten()``, whatever the strides. A non-finite value stays non-finite, or turns
    its group or its tensor into NaN; it never becomes finite. Finite values up to :meth:`largest` stay finite.

    Class attributes of an encoding:
        name: Its name in specifications.
        summary: One line for a reader.
        paper: Source of the format; empty if there is none.
        positional: The field that the value after the colon fills; None when it takes none.
        stored: False for an encoding that only simulates: its part has the type of x, and its bits are only counted.
        fixed_rate: Whether :meth:`packed_bytes` is exact; otherwise it is an upper bound, and the values decide.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    positional: ClassVar[str | None] = None
    stored: ClassVar[bool] = True
    fixed_rate: ClassVar[bool] = True

    @property
    def unit(self) -> int | None:
        """Elements after which the format begins afresh, bytes and words of noise included.

        A part that begins and ends at multiples of it is encoded as it is in the whole. None where there is no such
        number, because statistics are taken over all elements.
        """
        return None

    def seed_from(self, seed: int, first: int) -> int:
        """Return the seed whose noise is that of ``seed`` from element ``first`` on, a multiple of :attr:`unit`.

        For a format without noise it is ``seed``.
        """
        return noise.signed(seed)

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return the parts of x.

        Args:
            x: float32, float16, bfloat16 or float64, of any shape and strides.
            seed: Seed of the noise of stochastic rounding: a 0-d int64 tensor on the device of x.

        Raises:
            ValueError: An argument is not as above.
        """
        raise NotImplementedError

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the contiguous tensor that the parts stand for, of this shape and float type."""
        raise NotImplementedError

    def half_steps(self, parts: Parts, count: int) -> Tensor | None:
        """Return half of the smallest step between two codes of each element's group, float32 (count,).

        A magnitude that decodes to less may have been anything up to it. None where the step is too small to matter.
        """
        return None

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of all parts of a tensor of this shape and type, in closed form."""
        raise NotImplementedError

    def largest(self, dtype: torch.dtype) -> float:
        """Return the largest magnitude that decodes to a finite number, whatever the other values are.

        It is a number of type ``dtype`` (of float32 for float64), at most the largest of float32. If all values of a
        tensor are within it, none becomes infinite or NaN. A larger value may, and may turn its group or its tensor
        into NaN.
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
    """Return the elements of a float tensor as a contiguous vector, detached from the graph.

    Raises:
        ValueError: x is not of a float type, or not strided.
    """
    if x.dtype not in DTYPES or x.layout != torch.strided:
        raise ValueError(f"an encoding takes strided tensors of {DTYPES}, found {x.dtype} of layout {x.layout}")
    return x.detach().reshape(-1).contiguous()


def within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in a type, clamped to its finite range; NaN stays NaN."""
    limit = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp(-limit, limit).to(dtype)


def at_most(bound: float, dtype: torch.dtype) -> float:
    """Return the largest number of a type (of float32 for float64) that is not above a positive bound."""
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    fraction, exponent = math.frexp(bound)
    step = info.eps / 2  # between neighbouring fractions, which lie from 1/2 to 1
    return min(math.ldexp(math.floor(fraction / step) * step, exponent), info.max)


def parts_bytes(parts: Parts) -> int:
    """Return the bytes of all parts."""
    return sum(part.nbytes for part in parts)


class RoundedByWords(Encoding):
    """An encoding whose stochastic rounding takes the noise of element i from number i of a seed's words.

    Class attributes of an encoding:
        noise_bits: Bits of such a number, of :func:`actbench.ops.noise.lanes`.
    """

    noise_bits: ClassVar[int]

    def noise_unit(self, rounding: Rounding) -> int:
        """Return the elements that share a word of noise; 1 where there is none."""
        return 64 // self.noise_bits if rounding == "stochastic" else 1

    def seed_from(self, seed: int, first: int) -> int:
        """Return the seed whose words are those from the word of element ``first`` on."""
        return noise.advanced(seed, first * self.noise_bits // 64)


@dataclass(frozen=True)
class FloatFormat:
    """A float type with a narrower exponent than float32; ``least_exponent`` is the smallest of a normal number."""

    dtype: torch.dtype
    fraction_bits: int
    least_exponent: int

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max

    @property
    def least(self) -> float:
        """The smallest positive number."""
        return float(2.0 ** (self.least_exponent - self.fraction_bits))

    def nearest(self, x: Tensor) -> Tensor:
        """Return the nearest numbers of the format, ties to even, as torch converts."""
        return x.to(self.dtype)

    def stochastic(self, x: Tensor, seed: Tensor) -> Tensor:
        """Round float32 x of any shape so that the mean over seeds is x, for subnormal numbers too."""
        # the fraction of frexp lies from 1/2 to 1, that of a float from 1 to 2
        exponent = torch.frexp(x).exponent - 1
        quantum = torch.ldexp(torch.ones_like(x), exponent.clamp(min=self.least_exponent) - self.fraction_bits)
        return (stochastic(x / quantum, seed) * quantum).to(self.dtype)


# IEEE 754's binary16, and the 8-bit formats of Micikevicius et al. (arXiv 2209.05433)
FP16 = FloatFormat(torch.float16, 10, -14)
E4M3 = FloatFormat(torch.float8_e4m3fn, 3, -6)
E5M2 = FloatFormat(torch.float8_e5m2, 2, -14)


def bf16_stochastic(x: Tensor, seed: Tensor) -> Tensor:
    """Round float32 x of any shape to bfloat16 so that the mean over seeds is x.

    It adds 16 random bits below the fraction, then cuts them off: exact, also for subnormal numbers. Values beyond the
    largest number may become infinite, as in torch's conversion.
    """
    noise = lanes(seed, x.numel(), 16).to(torch.int32).view(x.shape)
    cut = ((x.view(torch.int32) + noise) & -65536).view(torch.float32)
    # the low bits of a NaN may be anything: cut off, or carried over, they would leave another number
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)
