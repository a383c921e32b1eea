"""Few-bit derivatives on CUDA: the launches of ``kernels/stepwise.cu``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel


def encode(x: Tensor, bounds: Tensor, bits: int, fold: bool) -> Tensor:
    """Pack, for each element, how many bounds lie strictly below it.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        bounds: float32, ascending, ``2**bits - 1`` of them.
        bits: 1 to 8.
        fold: Compare ``|x|``.

    Returns:
        uint8 of ``ceil(x.numel() * bits / 8)`` bytes.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    packed = torch.empty((x.numel() * bits + 7) // 8, dtype=torch.uint8, device=x.device)
    sign_mask = np.uint32(0x7FFFFFFF if fold else 0xFFFFFFFF)
    count = np.int64(x.numel())
    macros: rawkernel.Macros = {"BITS": bits, "SCALAR": rawkernel.SCALARS[x.dtype]}
    groups = -(-x.numel() // 8)
    rawkernel.launch("stepwise", "stepwise_encode", macros, groups, x, bounds, packed, count, sign_mask)
    return packed


def decode(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> Tensor:
    """Multiply each gradient by the level of its code, in float32, rounded once to the gradient's type.

    Args:
        packed: uint8, as :func:`encode` gives it.
        levels: float32, ``2**bits`` of them.
        grad: float32, float16 or bfloat16, contiguous.
        bits: 1 to 8.

    Returns:
        A tensor like ``grad``.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    out = torch.empty_like(grad)
    macros: rawkernel.Macros = {"BITS": bits, "SCALAR": rawkernel.SCALARS[grad.dtype]}
    groups, count = -(-grad.numel() // 8), np.int64(grad.numel())
    rawkernel.launch("stepwise", "stepwise_decode", macros, groups, packed, levels, grad, out, count)
    return out
