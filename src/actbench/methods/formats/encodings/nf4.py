"""NormalFloat: 4-bit codes for the quantiles of a normal distribution, with scales that are quantized once more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.methods.actnn.ops import groupquant
from actbench.methods.formats.encodings.encoding import Encoding, Parts, flat, within
from actbench.ops import bitpack

_PIECE = 2**23
"""Elements that are coded at once, a multiple of the group: temporaries do not grow with the tensor."""


def _levels() -> tuple[float, ...]:
    """Return the 16 numbers that codes stand for, from -1 to 1, with 0 among them.

    They are quantiles of the standard normal distribution, divided by the largest: 8 above zero and 7 below, each side
    at equal steps of probability from 1/2 to ``1 - (1/30 + 1/32) / 2``, so that the two sides together waste no code on
    a second zero (the paper's equation 4 and its appendix).
    """
    tail = (1 / 30 + 1 / 32) / 2
    above, below = (
        [NormalDist().inv_cdf(0.5 + (0.5 - tail) * step / steps) for step in range(1, steps + 1)] for steps in (8, 7)
    )
    return (*(-level / below[-1] for level in reversed(below)), 0.0, *(level / above[-1] for level in above))


LEVELS: Final = _levels()
"""What codes 0 to 15 stand for, times the scale of their group."""

_BETWEEN = tuple((one + other) / 2 for one, other in pairwise(LEVELS))
_PAIRS = tuple((LEVELS[byte & 15], LEVELS[byte >> 4]) for byte in range(256))
_LEAST_STEP = min(other - one for one, other in pairwise(LEVELS))


class Nf4(Encoding):
    """4-bit NormalFloat in groups of 64 with double quantization: 4.127 bits a number, or 4.5 without.

    Paper: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314, section 3.
    Each number is stored as the nearest of 16 levels times a scale, the largest magnitude of its group. The scales are
    quantized to 8 bits between the two bounds of 256 scales. Parts are the codes of the numbers, two a byte, the codes
    of the scales, 1 byte each, and a word for each 256 scales (:mod:`actbench.methods.actnn.ops.groupquant`). Zeros
    stay zeros. A non-finite value turns the 16,384 numbers whose scales share its bounds into NaN.
    Without double quantization scales are float32, 4 bytes each, and a non-finite value spoils 64 numbers.
    Not reproduced: the paper stores scales as 8-bit floats of their difference to their mean.

    Attributes:
        double_quantization: Whether scales are quantized too.
    """

    name: ClassVar[str] = "nf4"
    summary: ClassVar[str] = "4-bit codes for the quantiles of a normal distribution, scales in 8 bits"
    paper: ClassVar[str] = "Dettmers et al. 2023, arXiv 2305.14314"

    group_size: ClassVar[int] = 64
    scales_together: ClassVar[int] = 256

    double_quantization: bool = True

    @property
    def unit(self) -> int:
        """The elements whose scales share two bounds, or that share a scale."""
        return self.group_size * (self.scales_together if self.double_quantization else 1)

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (ceil(n / 2),) uint8, (ceil(n / 64),) uint8 and (ceil(n / 16384),) int32; no noise is drawn.

        Without double quantization the second is (ceil(n / 64),) int32, the bits of float32, and there is no third.
        """
        values = flat(x)
        codes = values.new_empty(bitpack.packed_bytes(values.numel(), 4), dtype=torch.uint8)
        scales = values.new_empty(self._groups(values.numel()), dtype=torch.float32)
        between = torch.tensor(_BETWEEN).to(x.device)
        for first in range(0, values.numel(), _PIECE):
            last = min(first + _PIECE, values.numel())
            grouped = _grouped(values[first:last].float(), self.group_size)
            largest = grouped.abs().amax(1)
            scales[first // self.group_size : self._groups(last)] = largest
            # a group of zeros has no largest magnitude to divide by
            shares = grouped / torch.where(largest > 0, largest, 1.0)[:, None]
            # int32 takes half the memory of the int64 that it would be
            nearest = torch.bucketize(shares, between, out_int32=True).to(torch.uint8)
            codes[first // 2 : (last + 1) // 2] = bitpack.pack_codes(nearest.view(-1)[: last - first], 4)
        if not self.double_quantization:
            return codes, scales.view(torch.int32)
        return codes, *groupquant.encode(scales, 8, self.scales_together, seed, False)

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return levels times scales."""
        codes, *_ = parts
        count = math.prod(shape)
        out = codes.new_empty(count, dtype=dtype)
        # bounds of scales are rounded outwards, and may leave the range of float16
        scales = within(self._scales(parts, count), dtype).float()[:, None]
        pairs = torch.tensor(_PAIRS).to(codes.device, non_blocking=True)  # made at each call: it is small
        pieces = (torch.split(x, _PIECE // each) for x, each in ((codes, 2), (scales, self.group_size), (out, 1)))
        for some, factors, target in zip(*pieces, strict=True):
            values = pairs.index_select(0, some.int()).view(-1)[: target.numel()]
            grouped = _grouped(values, self.group_size)
            grouped *= factors
            target.copy_(grouped.view(-1)[: target.numel()])
        return out.view(shape)

    def half_steps(self, parts: Parts, count: int) -> Tensor:
        """Return half of the distance of the two nearest levels, times the group's scale."""
        return (self._scales(parts, count) * (_LEAST_STEP / 2)).repeat_interleave(self.group_size)[:count]

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``ceil(n / 2) + ceil(n / 64) + 4 ceil(n / 16384)``, or ``ceil(n / 2) + 4 ceil(n / 64)``."""
        count = math.prod(shape)
        if not self.double_quantization:
            return bitpack.packed_bytes(count, 4) + 4 * self._groups(count)
        return bitpack.packed_bytes(count, 4) + groupquant.packed_bytes(self._groups(count), 8, self.scales_together)

    def _groups(self, count: int) -> int:
        return -(-count // self.group_size)

    def _scales(self, parts: Parts, count: int) -> Tensor:
        if not self.double_quantization:
            return parts[1].view(torch.float32)
        _, codes, words = parts
        return groupquant.decode(codes, words, 8, self.scales_together, 0, self._groups(count), torch.float32)


def _grouped(values: Tensor, size: int) -> Tensor:
    """Return a vector as rows of a size, the last one padded with zeros."""
    missing = -values.numel() % size
    return (F.pad(values, (0, missing)) if missing else values).view(-1, size)
