"""ReLU and its exact derivative of one bit an element, packed as in :mod:`actbench.ops.bitpack`.

All functions raise a ValueError for a wrong argument, and a KernelError if the CUDA kernel cannot be compiled or
launched.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import bitpack, rawkernel
from actbench.ops.library import Implementation, Kernels, check_contiguous, copied, define
from actbench.ops.mask import cpu


def positive(x: Tensor) -> Tensor:
    """Return where ReLU passes the gradient: above zero, and at NaN."""
    return ~(x <= 0)


def relu_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do what :func:`relu` does, in plain torch on any device."""
    return torch.relu(x.detach()), bitpack.pack(positive(x.reshape(-1)).to(torch.uint8), 1)


_fill_relu = copied(relu_reference, results=2)


def _over(fill: Implementation) -> Implementation:
    return lambda mask, x: fill(x, mask, x)


def select_reference(mask: Tensor, grad: Tensor) -> Tensor:
    """Do what :func:`select` does, in plain torch on any device."""
    bits = bitpack.unpack(mask, 1, grad.numel()).reshape(grad.shape)
    return torch.where(bits.bool(), grad.detach(), 0)


def launch_relu(out: Tensor, mask: Tensor, x: Tensor) -> None:
    """Launch ``relu_mask`` of ``kernels/mask.cu``; ``out`` may be x."""
    macros, groups = {"SCALAR": rawkernel.SCALARS[x.dtype]}, -(-x.numel() // 8)
    rawkernel.launch("mask", "relu_mask", macros, groups, x, out, mask, np.int64(x.numel()))


def launch_select(out: Tensor, mask: Tensor, grad: Tensor) -> None:
    """Launch ``mask_select`` of ``kernels/mask.cu``."""
    macros, groups = {"SCALAR": rawkernel.SCALARS[grad.dtype]}, -(-grad.numel() // 8)
    rawkernel.launch("mask", "mask_select", macros, groups, mask, grad, out, np.int64(grad.numel()))


@define("relu_mask(Tensor x) -> (Tensor, Tensor)", Kernels(cpu.relu, launch_relu, _fill_relu))
def relu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ReLU of x, as torch computes it on that device, and the packed bits of :func:`positive`.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous.

    Returns:
        A tensor like x, and uint8 ``(ceil(x.numel() / 8),)``.
    """
    check_contiguous(x)
    return torch.empty_like(x.contiguous()), x.new_empty(bitpack.packed_bytes(x.numel(), 1), dtype=torch.uint8)


@define(
    "relu_mask_(Tensor(a!) x) -> Tensor",
    Kernels(*map(_over, (cpu.relu, launch_relu, _fill_relu))),
)
def relu_(x: Tensor) -> Tensor:
    """Replace x by its ReLU and return the packed mask; else as :func:`relu`."""
    check_contiguous(x)
    return x.new_empty(bitpack.packed_bytes(x.numel(), 1), dtype=torch.uint8)


@define(
    "mask_select(Tensor mask, Tensor grad) -> Tensor",
    Kernels(cpu.select, launch_select, copied(select_reference)),
)
def select(mask: Tensor, grad: Tensor) -> Tensor:
    """Return each gradient whose bit is 1, and zero in place of the others.

    This selects and does not multiply, so that an infinite gradient at a dead unit gives 0, as in torch.

    Args:
        mask: uint8 ``(ceil(grad.numel() / 8),)``.
        grad: float32, float16, bfloat16 or float64, contiguous.

    Returns:
        A tensor like ``grad``.
    """
    check_contiguous(grad)
    bitpack.check_packed(mask, grad, 1)
    return torch.empty_like(grad.contiguous())
