from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from actbench.codecs.encodings.encoding import Encoding, Parts, Rounding, flat, within
from actbench.codecs.encodings.rounding import E5M2

_TOP = 15.0  # the binary logarithm of the largest magnitude after shifting and squeezing
_PIECES = 16  # of a sum, since torch makes a copy of what it adds up in another type
_LEAST_SPREAD = 2.0**-20  # of logarithms; below, all magnitudes are one number but for rounding


class S2fp8(Encoding):
    """8-bit floats of magnitudes that are shifted and squeezed on the axis of their logarithm, one map a tensor.

    Paper: Cambier et al., "Shifted and Squeezed 8-bit Floating Point format for Low-Precision Training of Deep Neural
    Networks", arXiv 2001.05674 (ICLR 2020). With mu and m the mean and the largest of ``log2|x|``:
    ``Y = sign(x) 2**(alpha (log2|x| - mu))``, ``alpha = 15 / (m - mu)``, kept as e5m2.
    Zeros stay zeros and have no part in mu and m, nor has what is not finite, which stays what it is. Where all
    magnitudes are one number alpha is 1. Parts are the bytes, and alpha and mu (the paper's beta is ``-alpha mu``) as
    float32, 8 bytes. Magnitudes far below a mean that is close to the maximum underflow to zero, as in the paper.

    Attributes:
        rounding: Of Y: to the nearest, or stochastic, which is without bias in Y and not in x.
    """

    name: ClassVar[str] = "s2fp8"
    summary: ClassVar[str] = "e5m2 of magnitudes shifted and squeezed on the axis of their logarithm"
    paper: ClassVar[str] = "Cambier et al. 2020, arXiv 2001.05674"

    rounding: Rounding = "nearest"

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (n,) float8_e5m2 and (2,) float32."""
        values = flat(x).float()
        logarithms = values.abs().log2()
        alpha, mu = _map(logarithms)
        squeezed = torch.exp2((alpha * (logarithms - mu)).clamp(max=_TOP)).copysign(values)
        squeezed = torch.where(values.isinf(), values, squeezed)
        numbers = E5M2.nearest(squeezed) if self.rounding == "nearest" else E5M2.stochastic(squeezed, seed)
        return numbers, torch.stack([alpha, mu])

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return ``sign(Y) 2**(log2|Y| / alpha + mu)``."""
        numbers, (alpha, mu) = parts[0].float(), parts[1]
        values = torch.exp2(numbers.abs().log2() / alpha + mu).copysign(numbers)
        return torch.where(numbers.isinf(), numbers.to(dtype), within(values, dtype)).view(shape)

    def half_steps(self, parts: Parts, count: int) -> Tensor:
        """Return what half of the least Y above zero stands for."""
        alpha, mu = parts[1]
        return torch.exp2(math.log2(E5M2.least / 2) / alpha + mu).expand(count)

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``n + 8``."""
        return math.prod(shape) + 8


def _map(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and mu, 0-d float32; 1 and 0 where there is no logarithm to go by. Waits for no device."""
    known = logarithms.isfinite()
    count = torch.count_nonzero(known)
    mean = _sum(torch.where(known, logarithms, 0)) / count.clamp(min=1)
    spread = _largest(logarithms.where(known, -torch.inf)).double() - mean
    alpha = torch.where((count > 0) & (spread > _LEAST_SPREAD), _TOP / spread, 1.0)
    return alpha.float(), mean.float()


def _sum(values: Tensor) -> Tensor:
    return torch.stack([piece.sum(dtype=torch.float64) for piece in values.chunk(_PIECES)]).sum()


def _largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_tensor(-torch.inf)
