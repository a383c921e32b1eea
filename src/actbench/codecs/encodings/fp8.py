from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from actbench.codecs.encodings.encoding import Encoding, Parts, Rounding, flat, within
from actbench.codecs.encodings.rounding import E4M3, E5M2

_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
_SCALES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LEAST = 2.0**-149  # of float32: the scale of a group of zeros, which must not be divided by zero


class Fp8(Encoding):
    """8-bit floats in groups, each scaled so that its largest magnitude is the format's largest number.

    Parts are the numbers, 1 byte each, and one scale a group, which is rounded to its type before numbers are divided
    by it, and up, so that none is clipped. A group with a value that is not finite is NaN again, all of it.

    Attributes:
        format: e4m3 (``torch.float8_e4m3fn``, up to 448) or e5m2 (``torch.float8_e5m2``, up to 57344).
        group_size: Elements that share a scale.
        scale: Type of a scale; none for numbers as they are, which are clipped to the format.
        rounding: To the nearest as torch converts, or stochastic, without bias.
    """

    name: ClassVar[str] = "fp8"
    summary: ClassVar[str] = "8-bit floats, scaled by the largest magnitude of each group"
    positional: ClassVar[str | None] = "format"

    format: Literal["e4m3", "e5m2"] = "e4m3"
    group_size: Annotated[int, Field(ge=1)] = 256
    scale: Literal["float32", "bfloat16", "none"] = "float32"
    rounding: Rounding = "nearest"

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (n,) of the format and, unless unscaled, (ceil(n / group_size),) of the type of a scale."""
        values = flat(x).float()
        if self.scale == "none":
            return (self._rounded(values, seed),)
        count, groups = values.numel(), -(-values.numel() // self.group_size)
        grouped = F.pad(values, (0, groups * self.group_size - count)).view(groups, self.group_size)
        scales = self._scales(grouped)
        return self._rounded((grouped / scales.float()[:, None]).view(-1)[:count], seed), scales

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return numbers times scales."""
        numbers = parts[0].float()
        if self.scale == "none":
            return numbers.view(shape).to(dtype)
        scales = parts[1].float().repeat_interleave(self.group_size)[: numbers.numel()]
        return within(numbers * scales, dtype).view(shape)

    def half_steps(self, parts: Parts, count: int) -> Tensor:
        """Return half of the format's least number, times the group's scale."""
        least = _FORMATS[self.format].least / 2
        if self.scale == "none":
            return torch.full((count,), least, device=parts[0].device)
        return (parts[1].float() * least).repeat_interleave(self.group_size)[:count]

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``n``, and 4 or 2 for each group."""
        count = math.prod(shape)
        each = 0 if self.scale == "none" else _SCALES[self.scale].itemsize
        return count + each * -(-count // self.group_size)

    def _scales(self, grouped: Tensor) -> Tensor:
        """Return the scale of each row, NaN where a value is not finite."""
        if not grouped.numel():
            return grouped.new_empty(len(grouped), dtype=_SCALES[self.scale])
        largest = grouped.abs().amax(1)
        wanted = (largest / _FORMATS[self.format].largest).clamp(min=_LEAST)
        scales = wanted.to(_SCALES[self.scale])
        # Zero, were the least float32 to be a bfloat16, is below what was wanted as well.
        scales = torch.where(scales.float() < wanted, torch.nextafter(scales, torch.full_like(scales, 1.0)), scales)
        return scales.masked_fill(~largest.isfinite(), torch.nan)

    def _rounded(self, values: Tensor, seed: Tensor) -> Tensor:
        """Return values in the format, clipped; infinities become NaN where the format has none."""
        to = _FORMATS[self.format]
        clipped = values.clamp(-to.largest, to.largest)
        rounded = to.nearest(clipped) if self.rounding == "nearest" else to.stochastic(clipped, seed)
        infinite = torch.nan if self.format == "e4m3" else values
        return torch.where(values.isfinite(), rounded.float(), infinite).to(to.dtype)
