"""8-bit floats, plain and with a shift and a squeeze (S2FP8)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from actbench.methods.formats.encodings.encoding import (
    E4M3,
    E5M2,
    Parts,
    RoundedByWords,
    Rounding,
    flat,
    within,
)
from actbench.ops.simulation import one_for_all

_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
_SCALES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PIECE = 1 << 22  # elements that are coded at once: temporaries do not grow with the tensor
_LEAST = 2.0**-149  # the least float32: scale of a group of zeros, against a division by zero


class Fp8(RoundedByWords):
    """8-bit floats in groups, each scaled so that its largest magnitude is the format's largest number.

    Parts are the numbers, 1 byte each, and one scale a group. The scale is rounded up to its type before it divides the
    numbers, so that none is clipped. A group with a non-finite value decodes to NaN.

    Attributes:
        format: e4m3 (``torch.float8_e4m3fn``, up to 448) or e5m2 (``torch.float8_e5m2``, up to 57344).
        group_size: Elements that share a scale.
        scale: Type of a scale; none stores the numbers unscaled, clipped to the format.
        rounding: To the nearest as torch converts, or stochastic, without bias.
    """

    name: ClassVar[str] = "fp8"
    summary: ClassVar[str] = "8-bit floats, scaled by the largest magnitude of each group"
    positional: ClassVar[str | None] = "format"
    noise_bits: ClassVar[int] = 32

    format: Literal["e4m3", "e5m2"] = "e4m3"
    group_size: Annotated[int, Field(ge=1)] = 256
    scale: Literal["float32", "bfloat16", "none"] = "float32"
    rounding: Rounding = "nearest"

    @property
    def unit(self) -> int:
        """The elements of a whole number of groups and of words of noise."""
        return math.lcm(1 if self.scale == "none" else self.group_size, self.noise_unit(self.rounding))

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return the numbers (n,) and, unless ``scale`` is none, the scales (ceil(n / group_size),)."""
        values = flat(x)
        numbers = values.new_empty(values.shape, dtype=_FORMATS[self.format].dtype)
        scales = None if self.scale == "none" else self._scales(self._largest(values).float())
        for piece in self._pieces(values):
            numbers[piece] = self._coded(values[piece].float(), scales, piece, seed)
        return (numbers,) if scales is None else (numbers, scales)

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return numbers times scales."""
        numbers, scales = parts[0], parts[1] if len(parts) > 1 else None
        found = numbers.new_empty(numbers.shape, dtype=dtype)
        for piece in self._pieces(numbers):
            found[piece] = self._decoded(numbers[piece].float(), scales, piece, dtype)
        return found.view(shape)

    def _coded(self, values: Tensor, scales: Tensor | None, piece: slice, seed: Tensor) -> Tensor:
        return self._rounded(values if scales is None else values / self._spread(scales, piece), seed)

    def _decoded(self, values: Tensor, scales: Tensor | None, piece: slice, dtype: torch.dtype) -> Tensor:
        return values.to(dtype) if scales is None else within(values * self._spread(scales, piece), dtype)

    def half_steps(self, parts: Parts, count: int) -> Tensor:
        """Return half of the format's least number, times the group's scale."""
        least = _FORMATS[self.format].least / 2
        if self.scale == "none":
            return torch.full((count,), least, device=parts[0].device)
        return (parts[1].float() * least).repeat_interleave(self.group_size)[:count]

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``n``, plus 4 or 2 for each group."""
        count = math.prod(shape)
        each = 0 if self.scale == "none" else _SCALES[self.scale].itemsize
        return count + each * -(-count // self.group_size)

    def _pieces(self, x: Tensor) -> Iterator[slice]:
        """Yield slices of whole groups, or of the only group; stochastic rounding takes one slice.

        Its noise counts all elements. A fake tensor yields one slice for all.
        """
        count = x.numel()
        if self.rounding == "stochastic":
            size = count
        elif self.group_size >= count:
            size = _PIECE
        else:
            size = max(_PIECE // self.group_size, 1) * self.group_size
        starts = range(0, count, max(size, 1))
        return one_for_all([slice(first, min(first + size, count)) for first in starts], of=x)

    def _spread(self, scales: Tensor, piece: slice) -> Tensor:
        """Return the scale of each element of a piece; only one number if there is only one scale."""
        if len(scales) == 1:
            return scales.float()
        of_piece = scales[piece.start // self.group_size : -(-piece.stop // self.group_size)].float()
        return of_piece.repeat_interleave(self.group_size)[: piece.stop - piece.start]

    def _largest(self, values: Tensor) -> Tensor:
        """Return the largest magnitude of each group; NaN where the group has a NaN."""
        whole = values.numel() - values.numel() % self.group_size
        rows = [values[:whole].view(-1, self.group_size), values[None, whole:]]
        bounds = [part.aminmax(dim=1) for part in rows if part.numel()]
        return torch.cat([torch.maximum(-low, high) for low, high in bounds] or [values.new_empty(0)])

    def _scales(self, largest: Tensor) -> Tensor:
        """Return the scale of each group, NaN where a value is not finite."""
        # In float64, because a subnormal quotient of float32 is rounded down by up to a half.
        wanted = (largest.double() / _FORMATS[self.format].largest).clamp(min=_LEAST)
        scales = wanted.to(_SCALES[self.scale])
        # In bfloat16 the least float32 rounds to zero, which is below what is wanted and is raised too.
        scales = torch.where(scales.double() < wanted, torch.nextafter(scales, torch.full_like(scales, 1.0)), scales)
        return scales.masked_fill(~largest.isfinite(), torch.nan)

    def _rounded(self, values: Tensor, seed: Tensor) -> Tensor:
        """Return values in the format, clipped; infinities become NaN where the format has none."""
        to = _FORMATS[self.format]
        clipped = values.clamp(-to.largest, to.largest)
        rounded = to.nearest(clipped) if self.rounding == "nearest" else to.stochastic(clipped, seed)
        infinite = torch.nan if self.format == "e4m3" else values
        return torch.where(values.isfinite(), rounded.float(), infinite).to(to.dtype)


_TOP = 15.0  # the binary logarithm of the largest magnitude after shifting and squeezing
_PIECES = 16  # of a sum: torch copies the numbers that it sums in another type
_LEAST_SPREAD = 2.0**-20  # of logarithms; below it all magnitudes are equal up to rounding


class S2fp8(RoundedByWords):
    """8-bit floats of magnitudes whose logarithms are shifted and squeezed, with one map for the tensor.

    Paper: Cambier et al., "Shifted and Squeezed 8-bit Floating Point format for Low-Precision Training of Deep Neural
    Networks", arXiv 2001.05674 (ICLR 2020). With mu and m the mean and the largest of ``log2|x|``:
    ``Y = sign(x) 2**(alpha (log2|x| - mu))``, ``alpha = 15 / (m - mu)``, stored as e5m2.
    Zeros and non-finite values stay as they are and do not count in mu and m. If all magnitudes are equal, alpha is 1.
    Parts are the bytes, and alpha and mu (the paper's beta is ``-alpha mu``) as float32, 8 bytes. Magnitudes far below
    a mean that is close to the maximum underflow to zero, as in the paper.

    Attributes:
        rounding: Rounding of Y: to the nearest, or stochastic, which is unbiased in Y but not in x.
    """

    name: ClassVar[str] = "s2fp8"
    noise_bits: ClassVar[int] = 32
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
        """Return the magnitude that half of the smallest positive Y stands for."""
        alpha, mu = parts[1]
        return torch.exp2(math.log2(E5M2.least / 2) / alpha + mu).expand(count)

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``n + 8``."""
        return math.prod(shape) + 8


def _map(logarithms: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha and mu, 0-d float32; 1 and 0 if no logarithm is finite. Does not wait for the device."""
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
