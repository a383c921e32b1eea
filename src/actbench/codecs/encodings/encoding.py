from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from actbench.results.records import Data
from actbench.spec import shortest

Parts = tuple[Tensor, ...]
Rounding = Literal["nearest", "stochastic"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    positional: ClassVar[str | None] = None
    stored: ClassVar[bool] = True
    fixed_rate: ClassVar[bool] = True

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
        """Return half of the least that lies between two codes of a group, for each of its elements, float32 (count,).

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
    if x.dtype not in FLOATS or x.layout != torch.strided:
        raise ValueError(f"an encoding takes strided tensors of {FLOATS}, found {x.dtype} of layout {x.layout}")
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
