from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from actbench.codecs.encodings.encoding import Encoding, Parts, Rounding, at_most, flat
from actbench.codecs.encodings.rounding import FP16, bf16_stochastic


class Bf16(Encoding):
    """bfloat16; the part is the vector of numbers, 2 bytes each. Beyond 3.39e38 it overflows to infinity.

    Attributes:
        rounding: To the nearest as torch converts, or stochastic, without bias.
    """

    name: ClassVar[str] = "bf16"
    summary: ClassVar[str] = "bfloat16: the range of float32, 8 bits of precision"
    kept_as: ClassVar[torch.dtype] = torch.bfloat16

    rounding: Rounding = "nearest"

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (n,) bfloat16."""
        values = flat(x)
        if self.rounding == "nearest" or x.dtype == torch.bfloat16:
            return (values.to(torch.bfloat16, copy=True),)
        return (bf16_stochastic(values.float(), seed),)

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the numbers."""
        return parts[0].view(shape).to(dtype)

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``2 n``."""
        return 2 * math.prod(shape)

    def largest(self, dtype: torch.dtype) -> float:
        """Return what no rounding takes beyond the largest number that is finite in this format and in that type.

        To the nearest that is all below half a step above it, 65520 for float16; at random it is the number itself.
        """
        top = at_most(torch.finfo(dtype).max, self.kept_as)
        if self.rounding == "nearest":
            step = math.ldexp(torch.finfo(self.kept_as).eps, math.frexp(top)[1] - 1)
            top = math.nextafter(top + step / 2, 0.0)  # ties go to the even neighbour, which is the one above
        return at_most(top, dtype)


class Fp16(Bf16):
    """float16; as :class:`Bf16`. Above 65504 it overflows to infinity, below 2**-24 little is left."""

    name: ClassVar[str] = "fp16"
    summary: ClassVar[str] = "float16: 11 bits of precision from 6e-5 to 65504, unscaled"
    kept_as: ClassVar[torch.dtype] = torch.float16

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (n,) float16."""
        values = flat(x)
        if self.rounding == "nearest" or x.dtype == torch.float16:
            return (values.to(torch.float16, copy=True),)
        return (FP16.stochastic(values.float(), seed),)
