"""Encodings that really store their bits: half precision, integer groups and SmaQ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.groupquant.reference import lanes_of
from actbench.methods.formats.encodings.encoding import (
    FP16,
    Encoding,
    Parts,
    RoundedByWords,
    Rounding,
    at_most,
    bf16_stochastic,
    flat,
)
from actbench.methods.formats.ops import smaq
from actbench.methods.formats.ops.smaq import reference
from actbench.methods.formats.ops.smaq.format import Format, format_of
from actbench.model.data import Data
from actbench.ops import noise


class Bf16(RoundedByWords):
    """bfloat16; the part is the vector of numbers, 2 bytes each. Beyond 3.39e38 it overflows to infinity.

    Attributes:
        rounding: To the nearest as torch converts, or stochastic, without bias.
    """

    name: ClassVar[str] = "bf16"
    summary: ClassVar[str] = "bfloat16: the range of float32, 8 bits of precision"
    kept_as: ClassVar[torch.dtype] = torch.bfloat16
    noise_bits: ClassVar[int] = 16

    rounding: Rounding = "nearest"

    @property
    def unit(self) -> int:
        """The elements that share a word of noise."""
        return self.noise_unit(self.rounding)

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (n,) of the format's type."""
        values = flat(x)
        if self.rounding == "nearest" or x.dtype == self.kept_as:
            # copied, since the values may be those of x itself, which may change before they are decoded
            return (values.to(self.kept_as, copy=True),)
        stochastic = bf16_stochastic if self.kept_as == torch.bfloat16 else FP16.stochastic
        return (stochastic(values.float(), seed),)

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the numbers."""
        return parts[0].view(shape).to(dtype)

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``2 n``."""
        return 2 * math.prod(shape)

    def largest(self, dtype: torch.dtype) -> float:
        """Return the largest magnitude that rounds to a finite number, both in this format and in that type.

        With rounding to the nearest it is below the largest number plus half a step (65520 for float16), else the
        largest number itself.
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
    noise_bits: ClassVar[int] = 32


class IntGroups(Encoding):
    """Whole numbers of a few bits between the smallest and the largest value of each group.

    Parts are the codes and one word a group with its two bounds as bfloat16
    (:mod:`actbench.methods.actnn.ops.groupquant`). Zeros stay zeros in groups with a bound of zero, as behind a
    ReLU. A group with a non-finite value decodes to NaN.

    Attributes:
        bits: Bits of a code, 2 to 8.
        group_size: Elements that share two bounds, a multiple of 32 from 32 to 1024.
        rounding: To the nearest code, or stochastic, without bias.
    """

    name: ClassVar[str] = "int"
    summary: ClassVar[str] = "whole numbers of a few bits between the bounds of each group"
    positional: ClassVar[str | None] = "bits"

    bits: Annotated[int, Field(ge=2, le=8)] = 6
    group_size: Annotated[int, Field(ge=32, le=1024, multiple_of=32)] = 64
    rounding: Rounding = "nearest"

    @property
    def unit(self) -> int:
        """The elements of a group."""
        return self.group_size

    def seed_from(self, seed: int, first: int) -> int:
        """Return the seed for groups from ``first`` on; each group has so many sequences as lanes share it."""
        return noise.from_sequence(seed, first // self.group_size * lanes_of(self.group_size))

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (ceil(n bits / 8),) uint8 and (ceil(n / group_size),) int32."""
        return groupquant.encode(flat(x), self.bits, self.group_size, seed, self.rounding == "stochastic")

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the decoded values."""
        codes, words = parts
        return groupquant.decode(codes, words, self.bits, self.group_size, 0, math.prod(shape), dtype).view(shape)

    def half_steps(self, parts: Parts, count: int) -> Tensor:
        """Return half a step of each element's group."""
        steps = groupquant.ranges(parts[1]) / ((1 << self.bits) - 1)
        return (steps * 0.5).repeat_interleave(self.group_size)[:count]

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``ceil(n bits / 8)``, and 4 for each group."""
        return groupquant.packed_bytes(math.prod(shape), self.bits, self.group_size)


class SmaqParameters(Data):
    """The parameters of SmaQ, shared by its encoding and its scheme.

    Attributes:
        main_bits: Bits of a number that is no outlier, 3 to 8.
        outlier_bits: Bits of an outlier, ``main_bits`` to 8.
        outliers: Share of outliers in a block, 0 to 1; ``outliers * block`` must be whole.
        block: Elements of a block, a multiple of 32 from 64 to 1024.
        rounding: Stochastic, without bias, or to the nearest.
    """

    main_bits: Annotated[int, Field(ge=3, le=8)] = 6
    outlier_bits: Annotated[int, Field(ge=3, le=8)] = 7
    outliers: Annotated[float, Field(ge=0, le=1)] = 0.25
    block: Annotated[int, Field(ge=64, le=1024, multiple_of=32)] = 256
    rounding: Rounding = "stochastic"

    @model_validator(mode="after")
    def _is_a_format(self) -> Self:
        format_of(self.main_bits, self.outlier_bits, self.outliers, self.block)
        return self

    @property
    def form(self) -> Format:
        """The layout of a block in memory."""
        return format_of(self.main_bits, self.outlier_bits, self.outliers, self.block)


class Smaq(SmaqParameters, Encoding):
    """SmaQ, really stored: a fixed share of each block are outliers, so that the bytes are known beforehand.

    Paper: Shoghi et al., "SmaQ: Smart Quantization for DNN Training by Exploiting Value Clustering", IEEE CAL 20(2),
    2021, DOI 10.1109/LCA.2021.3108505. The paper publishes no layout; this one is
    :mod:`actbench.methods.formats.ops.smaq.format`. The numbers farthest from the mean of their block are its outliers.
    The farthest sets their range, so none is clipped. The part is one vector of bytes. A block with a value that is not
    finite decodes to NaN, and so may one of magnitude 2**123 or more.
    """

    name: ClassVar[str] = "smaq"
    summary: ClassVar[str] = "SmaQ in blocks with a fixed share of outliers, packed"
    paper: ClassVar[str] = "Shoghi et al. 2021, DOI 10.1109/LCA.2021.3108505"

    @property
    def unit(self) -> int:
        """The elements of a block."""
        return self.block

    def seed_from(self, seed: int, first: int) -> int:
        """Return the seed for blocks from element ``first`` on."""
        return noise.from_sequence(seed, first // noise.NUMBERS)

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return one uint8 vector."""
        return (smaq.encode(flat(x), seed, self.form, stochastic=self.rounding == "stochastic"),)

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the decoded values."""
        return smaq.decode(parts[0], math.prod(shape), dtype, form=self.form).view(shape)

    def half_steps(self, parts: Parts, count: int) -> Tensor:
        """Return half a main step of each element's block."""
        return reference.half_steps(parts[0], count, self.form)

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``main_bits + (outlier_bits - main_bits) outliers + 64 / block`` bits a number, for whole blocks."""
        return self.form.packed_bytes(math.prod(shape))

    def largest(self, dtype: torch.dtype) -> float:
        """Return the largest number below 2**123: from there on, sums, differences and decoded values may overflow."""
        return at_most(math.nextafter(reference.LARGEST, 0.0), dtype)
