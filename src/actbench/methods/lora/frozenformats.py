"""Formats of frozen weight matrices, with the bytes of the libraries that store them: LLM.int8(), GPTQ and AWQ.

Scales are stored as whole numbers with the bits of floats: ``model.half()`` must not round them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Literal

import torch
from torch import Tensor

from actbench.methods.formats.encodings import Encoding, Nf4, Parts

FrozenFormat = Literal["nf4", "nf4_single", "int8", "gptq", "awq"]


class Int8Rows(Encoding):
    """8-bit whole numbers, with the largest magnitude of each row as its scale.

    Paper: Dettmers et al., "LLM.int8()", arXiv 2208.07339, section 2.1; the parts are those of bitsandbytes'
    ``Linear8bitLt``. Not reproduced: inputs in 8 bits, and outlier columns that are multiplied in 16 bits.
    """

    name: ClassVar[str] = "int8"

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return (d_out, d_in) int8 and (d_out,) int32, the bits of float32."""
        scales = x.detach().abs().amax(1).float()
        # a row of zeros has no largest magnitude to divide by
        shares = x.detach() * (127 / torch.where(scales > 0, scales, 1.0))[:, None]
        return shares.round_().to(torch.int8), scales.view(torch.int32)

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return (d_out, d_in)."""
        codes, scales = parts
        # a 127th of a small float16 is 0 in float16; 128 times that is none, and a code / 128 is exact
        return codes.to(dtype).div_(128).mul_((scales.view(torch.float32) / 127 * 128).to(dtype)[:, None])

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``n + 4 d_out``."""
        outputs, inputs = shape
        return outputs * inputs + 4 * outputs


class Int4Groups(Encoding):
    """4-bit whole numbers above the zero of each group of inputs, in the layouts of GPTQ and AWQ.

    Papers: Frantar et al., "GPTQ", arXiv 2210.17323; Lin et al., "AWQ", arXiv 2306.00978. The parts have the shapes and
    types of their checkpoints: codes, eight an int32; zeros, eight an int32; float16 scales; and, for GPTQ, the
    group of each input. A matrix whose width is not a multiple of the group has one group for each output.
    Not reproduced: what their calibration does to the codes. Weights are rounded to the nearest.

    Attributes:
        group_size: How many inputs share a scale and a zero; 0 for all.
        order: Whether the group of each input is stored (GPTQ).
        outputs_together: Whether eight outputs share an int32 of codes (AWQ), or eight inputs (GPTQ).
    """

    name: ClassVar[str] = "int4"

    group_size: int = 128
    order: bool = True
    outputs_together: bool = False

    def encode(self, x: Tensor, seed: Tensor) -> Parts:
        """Return int32 codes and zeros, (groups, d_out) int16 scales, the bits of float16, and (d_in,) int32.

        The last, the group of each input, only with ``order``.

        Raises:
            ValueError: A width is not a multiple of 8.
        """
        outputs, inputs = x.shape
        if outputs % 8 or inputs % 8:
            raise ValueError(f"GPTQ and AWQ store matrices whose widths are multiples of 8, not {inputs} x {outputs}")
        size = self._group(inputs)
        grouped = x.detach().float().t().reshape(inputs // size, size, outputs)
        # zero is a code of each group, so that a weight of zero stays one
        low, high = grouped.amin(1).clamp_(max=0), grouped.amax(1).clamp_(min=0)
        # codes follow the scale as it is stored, rounded to float16
        scales = ((high - low) / 15).to(torch.float16)
        steps = torch.where(scales > 0, scales.float(), 1.0)
        zeros = (-low / steps).round_().clamp_(0, 15)
        codes = (grouped / steps[:, None]).round_().add_(zeros[:, None]).clamp_(0, 15).view(inputs, outputs)
        packed = _packed(codes, 1) if self.outputs_together else _packed(codes, 0)
        groups = torch.arange(inputs, dtype=torch.int32, device=x.device) // size
        return packed, _packed(zeros, 1), scales.view(torch.int16), *((groups,) if self.order else ())

    def decode(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the weight (d_out, d_in) as a transposed view of a contiguous (d_in, d_out)."""
        codes, zeros, scales, *_ = parts
        outputs, inputs = shape
        size = self._group(inputs)
        values = _unpacked(codes, 1 if self.outputs_together else 0, dtype)
        grouped = values.view(inputs // size, size, outputs)
        grouped -= _unpacked(zeros, 1, dtype)[:, None]
        grouped *= scales.view(torch.float16).to(dtype)[:, None]
        return values.t()

    def packed_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return ``n / 2`` and ``2.5 n / group``, and with ``order`` ``4 d_in``."""
        outputs, inputs = shape
        groups = inputs // self._group(inputs)
        return outputs * inputs // 2 + groups * outputs * 5 // 2 + 4 * inputs * self.order

    def _group(self, inputs: int) -> int:
        return inputs if not self.group_size or inputs % self.group_size else self.group_size


def _packed(codes: Tensor, dim: int) -> Tensor:
    """Return codes of 4 bits, eight an int32 along a dimension."""
    whole = codes.to(torch.int32)
    packed = _lane(whole, dim, 0).clone()
    for lane in range(1, 8):
        # the eighth code reaches the sign of an int32, which & 15 cuts off again in _unpacked
        packed |= _lane(whole, dim, lane) << 4 * lane
    return packed


def _unpacked(packed: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    shape = [8 * size if each == dim else size for each, size in enumerate(packed.shape)]
    out = packed.new_empty(shape, dtype=dtype)
    for lane in range(8):
        _lane(out, dim, lane).copy_((packed >> 4 * lane) & 15)
    return out


def _lane(x: Tensor, dim: int, lane: int) -> Tensor:
    """Return every eighth row or column of a matrix, from one on."""
    return x[lane::8] if dim == 0 else x[:, lane::8]


FROZEN_FORMATS: Final[dict[FrozenFormat, Encoding]] = {
    "nf4": Nf4(),
    "nf4_single": Nf4(double_quantization=False),
    "int8": Int8Rows(),
    "gptq": Int4Groups(),
    "awq": Int4Groups(order=False, outputs_together=True),
}
"""What ``weights=`` names."""

FLAT_PARTS: Final[dict[FrozenFormat, int]] = {"nf4": 1, "nf4_single": 1, "gptq": 2}
"""How many parts, from the first, libraries store in the model's type for FSDP1: codes, and GPTQ's zeros."""
