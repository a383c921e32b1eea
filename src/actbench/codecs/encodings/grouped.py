from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from actbench.codecs.encodings.encoding import Encoding, Parts, Rounding, flat
from actbench.ops import groupquant


class IntGroups(Encoding):
    """Whole numbers of a few bits between the smallest and the largest value of each group.

    Parts are the codes and one word a group, its two bounds as bfloat16: :mod:`actbench.ops.groupquant`. Zeros stay
    zeros in groups whose bound is zero, so behind a ReLU. A group with a value that is not finite is NaN, all of it.

    Attributes:
        bits: Of a code, 2 to 8.
        group_size: Elements that share two bounds, a multiple of 32 from 32 to 1024.
        rounding: To the nearest code, or stochastic, without bias.
    """

    name: ClassVar[str] = "int"
    summary: ClassVar[str] = "whole numbers of a few bits between the bounds of each group"
    positional: ClassVar[str | None] = "bits"

    bits: Annotated[int, Field(ge=2, le=8)] = 6
    group_size: Annotated[int, Field(ge=32, le=1024, multiple_of=32)] = 64
    rounding: Rounding = "nearest"

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (ceil(n bits / 8),) uint8 and (ceil(n / group_size),) int32."""
        return groupquant.encode(flat(x), self.bits, self.group_size, seed, self.rounding == "stochastic")

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return what the codes stand for."""
        codes, words = parts
        return groupquant.decode(codes, words, self.bits, self.group_size, 0, math.prod(shape), dtype).view(shape)

    def half_steps(self, parts: Parts, count: int) -> Tensor:
        """Return half a step of each element's group."""
        steps = groupquant.ranges(parts[1]) / ((1 << self.bits) - 1)
        return (steps * 0.5).repeat_interleave(self.group_size)[:count]

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``ceil(n bits / 8)``, and 4 for each group."""
        return groupquant.packed_bytes(math.prod(shape), self.bits, self.group_size)
