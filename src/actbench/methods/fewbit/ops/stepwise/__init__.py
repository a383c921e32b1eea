"""Few-bit derivatives: packs which step of a piecewise-constant function each element is on, and reads it back.

Codes are packed as in :mod:`actbench.ops.bitpack`. Half types are compared and multiplied as float32, which holds them
exactly; the reference computes float64.

All functions raise a ValueError for a wrong argument, and a KernelError if the CUDA kernel cannot be compiled or
launched.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.methods.fewbit.ops.stepwise import cpu
from actbench.ops import bitpack, rawkernel
from actbench.ops.library import (
    Kernels,
    check_bits,
    check_contiguous,
    check_table,
    copied,
    define,
    empty_contiguous,
    wide,
)


def encode_reference(x: Tensor, bounds: Tensor, bits: int, fold: bool) -> Tensor:
    """Do what :func:`encode` does, in plain torch on any device; every kernel must agree bit for bit."""
    values = wide(x).reshape(-1)
    values = values.abs() if fold else values
    # bucketize with right=False counts the bounds that are strictly below
    codes = torch.bucketize(values, bounds.to(values.dtype)).to(torch.uint8)
    return bitpack.pack(codes.masked_fill(values.isnan(), 0), bits)


def decode_reference(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> Tensor:
    """Do what :func:`decode` does, in plain torch on any device."""
    codes = bitpack.unpack(packed, bits, grad.numel())
    values = wide(grad)
    return (values * levels.to(values.dtype)[codes].reshape(grad.shape)).to(grad.dtype)


def launch_encode(packed: Tensor, x: Tensor, bounds: Tensor, bits: int, fold: bool) -> None:
    """Launch ``stepwise_encode`` of ``kernels/stepwise.cu``."""
    # the kernel takes the absolute by cutting the sign off the bits of a float32
    sign_mask, count = np.uint32(0x7FFFFFFF if fold else 0xFFFFFFFF), np.int64(x.numel())
    macros: rawkernel.Macros = {"BITS": bits, "SCALAR": rawkernel.SCALARS[x.dtype]}
    rawkernel.launch("stepwise", "stepwise_encode", macros, -(-x.numel() // 8), x, bounds, packed, count, sign_mask)


def launch_decode(out: Tensor, packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> None:
    """Launch ``stepwise_decode`` of ``kernels/stepwise.cu``."""
    macros: rawkernel.Macros = {"BITS": bits, "SCALAR": rawkernel.SCALARS[grad.dtype]}
    groups, count = -(-grad.numel() // 8), np.int64(grad.numel())
    rawkernel.launch("stepwise", "stepwise_decode", macros, groups, packed, levels, grad, out, count)


@define(
    "stepwise_encode(Tensor x, Tensor bounds, int bits, bool fold) -> Tensor",
    Kernels(cpu.encode, launch_encode, copied(encode_reference)),
)
def encode(x: Tensor, bounds: Tensor, bits: int, fold: bool) -> Tensor:
    """Pack, for each element, how many bounds lie strictly below it.

    NaN has code 0; the forward output, which is exact, passes the NaN on.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous.
        bounds: float32 ``(2**bits - 1,)``, ascending.
        bits: 1 to 8.
        fold: Compare ``|x|``, for even derivatives.

    Returns:
        uint8 ``(ceil(x.numel() * bits / 8),)``.
    """
    check_bits(bits)
    check_contiguous(x)
    check_table(bounds, x, bits, (1 << bits) - 1, "bounds")
    return x.new_empty(bitpack.packed_bytes(x.numel(), bits), dtype=torch.uint8)


@define(
    "stepwise_decode(Tensor packed, Tensor levels, Tensor grad, int bits) -> Tensor",
    Kernels(cpu.decode, launch_decode, copied(decode_reference)),
)
def decode(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> Tensor:
    """Return ``grad * levels[code]``: one product in float32 (float64 for float64), rounded once to the type of grad.

    Args:
        packed: uint8 ``(ceil(grad.numel() * bits / 8),)``, as :func:`encode` returns it.
        levels: float32 ``(2**bits,)``.
        grad: float32, float16, bfloat16 or float64, contiguous.
        bits: 1 to 8.

    Returns:
        A tensor like ``grad``.
    """
    check_bits(bits)
    check_contiguous(grad)
    check_table(levels, grad, bits, 1 << bits, "levels")
    bitpack.check_packed(packed, grad, bits)
    return empty_contiguous(grad)
