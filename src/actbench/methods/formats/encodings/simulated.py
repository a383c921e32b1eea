"""SmaQ as its authors simulate it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from actbench.methods.formats.encodings.encoding import Encoding, Parts, at_most, flat, within
from actbench.ops.library import wide
from actbench.ops.noise import random_words
from actbench.ops.rounding import stochastic

Statistics = Literal["full", "sample", "range"]
_LEAST, _MOST = 1e-38, 1e38  # of the deviation that is divided by
_LARGEST = 2.0**40  # CUDA sums squares in float32, which holds the sum of 2**40 such squares


class SmaqSimulated(Encoding):
    """SmaQ as its authors ran it: numbers are quantized and dequantized at once, and bits are only counted.

    Paper: Shoghi et al., "SmaQ: Smart Quantization for DNN Training by Exploiting Value Clustering", IEEE CAL 20(2),
    2021, DOI 10.1109/LCA.2021.3108505. Let z = (x - mean) / deviation over the whole tensor, L = 2**(bits - 2) - 1::

        |z| <= main_threshold    rounded in steps of main_threshold / L_main
        |z| >  main_threshold    sign(z) (|z| - main_threshold) rounded in steps of
                                 (outlier_threshold - main_threshold) / L_outlier

    The part is the tensor of quantized values, of the type and size of x. :meth:`counted_bits` is what the authors
    count: ``main_bits`` or ``outlier_bits`` an element, and nothing for mean and deviation. Nothing is clipped by
    default, although values beyond ``outlier_threshold`` then have codes that do not fit ``outlier_bits``.
    Not reproduced: the narrower limits of the deviation under 16-bit trainers, which scale small tensors down.

    Attributes:
        main_bits: Bits of values up to ``main_threshold``, tag and sign included; at least 3.
        outlier_bits: Bits of values beyond it; at least 3.
        main_threshold: Where outliers begin, in deviations.
        outlier_threshold: Where the codes of outliers end, in deviations.
        statistics: full: mean and unbiased deviation; sample: those of ``samples`` random elements, biased;
            range: deviation as (max - min) / sqrt(2 ln n).
        samples: How many elements ``sample`` reads.
        rounding: Stochastic, to the nearest, or truncate toward zero (the authors' other choice).
        clamp: Whether codes are clipped to the bits that are counted.
        nonnegative: Whether results below zero become zero, as for Adam's second moment.
        min_size: A tensor with fewer elements stays as it is.
    """

    name: ClassVar[str] = "smaq_simulated"
    summary: ClassVar[str] = "SmaQ as published: nothing is packed, bits are counted"
    paper: ClassVar[str] = "Shoghi et al. 2021, DOI 10.1109/LCA.2021.3108505"
    stored: ClassVar[bool] = False

    main_bits: Annotated[int, Field(ge=3, le=16)] = 6
    outlier_bits: Annotated[int, Field(ge=3, le=16)] = 8
    main_threshold: PositiveFloat = 1.0
    outlier_threshold: PositiveFloat = 2.5
    statistics: Statistics = "full"
    samples: PositiveInt = 16
    rounding: Literal["stochastic", "nearest", "truncate"] = "stochastic"
    clamp: bool = False
    nonnegative: bool = False
    min_size: Annotated[int, Field(ge=2)] = 8

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.outlier_threshold <= self.main_threshold:
            raise ValueError(
                f"outlier_threshold={self.outlier_threshold:g} must be above main_threshold={self.main_threshold:g}"
            )
        return self

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (n,) of the type of x."""
        values = flat(x)
        if values.numel() < self.min_size:
            # values may be those of x itself, which may change before they are decoded
            return (values.clone(),)
        mean, deviation = moments(wide(values), self.statistics, self.samples, seed)
        found = self.quantized(wide(values), mean, deviation, seed)
        # Rounding up may pass the largest float16. So may a value that is very many deviations of a sample away.
        return (torch.where(values.isinf(), found.to(x.dtype), within(found, x.dtype)),)

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the values."""
        return parts[0].view(shape).to(dtype)

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of the tensor itself: nothing is packed."""
        return math.prod(shape) * dtype.itemsize

    def largest(self, dtype: torch.dtype) -> float:
        """Return 2**40: up to it the deviation is finite on every device. A CPU takes far larger values."""
        return at_most(_LARGEST, dtype)

    def counted_bits(self, x: Tensor, seed: Tensor) -> float | None:
        """Return the bits per element that the authors count; 32 for a tensor that stays as it is."""
        values = wide(flat(x))
        if values.numel() < self.min_size:
            return 32.0
        mean, deviation = moments(values, self.statistics, self.samples, seed)
        outliers = (self._standardized(values, mean, deviation).abs() > self.main_threshold).sum().item()
        return self.main_bits + (self.outlier_bits - self.main_bits) * outliers / values.numel()

    def quantized(self, values: Tensor, mean: Tensor, deviation: Tensor, seed: Tensor) -> Tensor:
        """Quantize and dequantize float32 or float64 values, standardized by this mean and deviation."""
        z = self._standardized(values, mean, deviation)
        most_main, most_outlier = 2 ** (self.main_bits - 2) - 1, 2 ** (self.outlier_bits - 2) - 1
        main_rate = most_main / self.main_threshold
        outlier_rate = most_outlier / (self.outlier_threshold - self.main_threshold)
        outlier, sign = z.abs() > self.main_threshold, z.sign()
        place = torch.where(outlier, (z - sign * self.main_threshold) * outlier_rate, z * main_rate)
        code = self._rounded(place, seed)
        if self.clamp:
            most = torch.where(outlier, most_outlier, most_main)
            code = torch.minimum(torch.maximum(code, -most), most)
        found = torch.where(outlier, code / outlier_rate + sign * self.main_threshold, code / main_rate)
        result = found * deviation + mean
        return result.clamp(min=0) if self.nonnegative else result

    def _standardized(self, values: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        return (values - mean) / deviation.clamp(_LEAST, _MOST)

    def _rounded(self, place: Tensor, seed: Tensor) -> Tensor:
        match self.rounding:
            case "stochastic":
                return stochastic(place, seed)
            case "nearest":
                return place.round()
            case "truncate":
                return place.trunc()


def moments(values: Tensor, statistics: Statistics, samples: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation, 0-d, of two or more float32 or float64 values (n,); a deviation of 0 becomes 1.

    :class:`SmaqSimulated` explains ``statistics``; ``sample`` reads ``samples`` elements, at most n.
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
    """Return distinct random elements: the first of a permutation of all. This is slow, but what the authors do."""
    words = random_words(seed, values.numel(), values.numel())  # behind the words of rounding
    return values[words.argsort(stable=True)[:samples]]
