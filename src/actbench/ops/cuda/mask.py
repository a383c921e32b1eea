"""ReLU with its mask on CUDA: the launches of ``kernels/mask.cu``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel


def relu(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ReLU of x and one bit for each element: whether it is above zero or NaN.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        out: A tensor like x to write to, which may be x.

    Returns:
        ``out``, and uint8 of ``ceil(x.numel() / 8)`` bytes.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    out = torch.empty_like(x) if out is None else out
    mask = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
    macros, groups = {"SCALAR": rawkernel.SCALARS[x.dtype]}, -(-x.numel() // 8)
    rawkernel.launch("mask", "relu_mask", macros, groups, x, out, mask, np.int64(x.numel()))
    return out, mask


def select(mask: Tensor, grad: Tensor) -> Tensor:
    """Return each gradient whose bit is 1, and zero in place of the others.

    Args:
        mask: uint8, as :func:`relu` gives it.
        grad: float32, float16 or bfloat16, contiguous.

    Returns:
        A tensor like ``grad``.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    out = torch.empty_like(grad)
    macros, groups = {"SCALAR": rawkernel.SCALARS[grad.dtype]}, -(-grad.numel() // 8)
    rawkernel.launch("mask", "mask_select", macros, groups, mask, grad, out, np.int64(grad.numel()))
    return out
