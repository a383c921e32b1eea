from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from actbench.errors import UsageError
from actbench.methods.formats.encodings.bdi import (
    BATCH,
    BaseChoice,
    Compressed,
    Configuration,
    compress,
    configurations,
    decompress,
)
from actbench.methods.formats.encodings.encoding import Encoding, Parts, flat, within


class NnwBdi(Encoding):
    """Weights as whole numbers: batches of 64 store a few bases and, for each number, a short difference to a base.

    Paper: "Neural Network Weight Compression with NNW-BDI", MEMSYS 2020, DOI 10.1145/3422575.3422805, after
    base-delta-immediate compression (Pekhimenko et al., PACT 2012). The tensor is quantized between its smallest and
    largest value; the rest is lossless, see :mod:`actbench.methods.formats.encodings.bdi`. All that decoding needs is
    stored: the range of the codes (8 bytes), a byte a batch for its configuration, bases, masks of zeros, and a stream
    of differences, each behind the number of its base if there are several. A batch that no configuration shortens is
    stored as it is. Fewer ``bits`` stand for the paper's downscaling, a right shift of the codes, but round.
    Sizes depend on the values. Runs on the CPU.

    Attributes:
        bits: Bits of a code before compression, 2 to 8.
        bases: The most bases of a batch, 0 to 3, beside the implied base zero.
        zeros: Whether a mask of 64 bits may replace the zeros of a batch.
        choice: Which uncovered code becomes the next base: random as in the paper, the first, or the smallest, which
            covers with the fewest bases and never costs more.
    """

    name: ClassVar[str] = "nnwbdi"
    summary: ClassVar[str] = "whole numbers of a tensor's range, in batches as bases and differences"
    paper: ClassVar[str] = "NNW-BDI, MEMSYS 2020, DOI 10.1145/3422575.3422805"
    fixed_rate: ClassVar[bool] = False

    bits: Annotated[int, Field(ge=2, le=8)] = 8
    bases: Annotated[int, Field(ge=0, le=3)] = 2
    zeros: bool = True
    choice: BaseChoice = "random"

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return uint8 vectors of configurations, bases, masks and differences, and (2,) float32, offset and step.

        Raises:
            ValueError: An argument is not as :meth:`Encoding.encode` takes it.
            UsageError: x is not on the CPU.
        """
        if not x.is_cpu:
            raise UsageError(f"nnwbdi runs on the CPU, found a tensor on {x.device}: move it, or choose int:6")
        codes, extent = _quantized(flat(x).double().numpy(), 2**self.bits - 1)
        found = compress(codes, self._configurations(), self.choice, int(seed.item()))
        return (*(torch.from_numpy(part) for part in found), torch.from_numpy(extent))

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return ``offset + code * step``."""
        found = Compressed(*(part.numpy() for part in parts[:4]))
        codes = torch.from_numpy(decompress(found, self._configurations(), math.prod(shape)))
        offset, step = parts[4].double()
        return within(offset + codes * step, dtype).view(shape)

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the most bytes that n numbers can take: 8, plus 1 for each batch, plus ``ceil(n bits / 8)``."""
        count = math.prod(shape)
        return 8 + -(-count // BATCH) + -(-count * self.bits // 8)

    def _configurations(self) -> tuple[Configuration, ...]:
        return configurations(self.bits, self.bases, self.zeros)


def _quantized(values: NDArray[np.float64], most: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the nearest codes, uint8, and offset and step as float32, both NaN where a value is not finite."""
    if not values.size:
        return np.zeros(0, np.uint8), np.zeros(2, np.float32)
    with np.errstate(over="ignore"):  # the next check finds an overflow of float32
        extent = np.array([values.min(), (values.max() - values.min()) / most], np.float32)
    if not np.isfinite(extent).all():
        return np.zeros(values.shape, np.uint8), np.full(2, np.nan, np.float32)
    offset, step = extent.astype(np.float64)
    if step == 0:
        return np.zeros(values.shape, np.uint8), extent
    return np.rint((values - offset) / step).clip(0, most).astype(np.uint8), extent
