from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from actbench.codecs.encodings.encoding import Encoding, Parts, Rounding, at_most, flat
from actbench.ops import smaq, smaqblocks
from actbench.ops.smaqformat import Format, format_of
from actbench.records import Data


class SmaqParameters(Data):
    """Which SmaQ: the fields of the encoding, and of the scheme that stores things in it.

    Attributes:
        main_bits: Of a number that is no outlier, 3 to 8.
        outlier_bits: Of an outlier, ``main_bits`` to 8.
        outliers: Their share of a block, 0 to 1; ``outliers * block`` must be whole.
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
        """How the blocks lie in memory."""
        return format_of(self.main_bits, self.outlier_bits, self.outliers, self.block)


class Smaq(SmaqParameters, Encoding):
    """SmaQ, really stored: blocks of which a fixed share are outliers, so that bytes are known beforehand.

    Paper: Shoghi et al., "SmaQ: Smart Quantization for DNN Training by Exploiting Value Clustering", IEEE CAL 20(2),
    2021, DOI 10.1109/LCA.2021.3108505, which publishes no layout; this one is of :mod:`actbench.ops.smaqformat`. The
    numbers farthest from the mean of their block are its outliers, and the farthest ends their range: none is clipped.
    The part is one vector of bytes. A block with a value that is not finite, or from 2**126 on, is NaN, all of it.
    """

    name: ClassVar[str] = "smaq"
    summary: ClassVar[str] = "SmaQ in blocks with a fixed share of outliers, packed"
    paper: ClassVar[str] = "Shoghi et al. 2021, DOI 10.1109/LCA.2021.3108505"

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return one uint8 vector."""
        return (smaq.encode(flat(x), seed, stochastic=self.rounding == "stochastic", **self._format()),)

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return what the codes stand for."""
        return smaq.decode(parts[0], math.prod(shape), dtype, **self._format()).view(shape)

    def half_steps(self, parts: Parts, count: int) -> Tensor:
        """Return half a main step of each element's block."""
        return smaqblocks.half_steps(parts[0], count, self.form)

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return, of whole blocks, ``main_bits + (outlier_bits - main_bits) outliers + 64 / block`` bits a number."""
        return self.form.packed_bytes(math.prod(shape))

    def largest(self, dtype: torch.dtype) -> float:
        """Return the number below 2**126: from there on a difference of two, and what it decodes to, may overflow."""
        return at_most(math.nextafter(smaqblocks.HUGE, 0.0), dtype)

    def _format(self) -> dict[str, Any]:
        return self.model_dump(exclude={"rounding"})
