"""ReLU and its derivative as one bit an element, exactly.

``actbench::relu_mask(x)`` gives ReLU of x, as torch computes it on that device, and the bits of :func:`positive`,
packed as in :mod:`actbench.ops.bitpack`; ``relu_mask_(x)`` writes the first over x and returns the second.
``actbench::mask_select(mask, grad)`` is ``grad`` where the bit is 1 and zero where it is 0: a choice and no product, so
that an infinite gradient at a dead unit gives 0, as in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.ops import bitpack
from actbench.ops.arguments import check_contiguous, check_packed
from actbench.ops.cpu import mask as cpu
from actbench.ops.cuda import mask as cuda
from actbench.ops.library import define, direct


def positive(x: Tensor) -> Tensor:
    """Return where ReLU passes the gradient on: above zero, and at NaN."""
    return ~(x <= 0)


def relu_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ReLU and the packed mask in plain torch, on any device.

    Args:
        x: float32, float16, bfloat16 or float64, contiguous.

    Returns:
        A tensor like x, and uint8 ``(ceil(x.numel() / 8),)``.
    """
    check_contiguous(x)
    return torch.relu(x.detach()), bitpack.pack(positive(x.reshape(-1)).to(torch.uint8), 1)


def select_reference(mask: Tensor, grad: Tensor) -> Tensor:
    """Return ``grad`` or zero by the mask's bits, in plain torch, on any device.

    Args:
        mask: uint8 ``(ceil(grad.numel() / 8),)``.
        grad: float32, float16, bfloat16 or float64, contiguous.

    Returns:
        A tensor like ``grad``.
    """
    check_contiguous(grad)
    check_packed(mask, grad, 1)
    bits = bitpack.unpack(mask, 1, grad.numel()).reshape(grad.shape)
    return torch.where(bits.bool(), grad.detach(), 0)


def _relu_cpu(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return relu_reference(x)
    check_contiguous(x)
    return cpu.relu(x)


def _relu_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return relu_reference(x)
    check_contiguous(x)
    return cuda.relu(x)


def _relu_cpu_in_place(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return _relu_reference_in_place(x)
    check_contiguous(x)
    return cpu.relu(x, x)[1]


def _relu_cuda_in_place(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return _relu_reference_in_place(x)
    check_contiguous(x)
    return cuda.relu(x, x)[1]


def _relu_reference_in_place(x: Tensor) -> Tensor:
    out, mask = relu_reference(x)
    x.copy_(out)
    return mask


def _relu_fake_in_place(x: Tensor) -> Tensor:
    check_contiguous(x)
    return x.new_empty(bitpack.packed_bytes(x.numel(), 1), dtype=torch.uint8)


def _relu_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    check_contiguous(x)
    return torch.empty_like(x.contiguous()), x.new_empty(bitpack.packed_bytes(x.numel(), 1), dtype=torch.uint8)


def _select_cpu(mask: Tensor, grad: Tensor) -> Tensor:
    if grad.dtype == torch.float64:
        return select_reference(mask, grad)
    check_contiguous(grad)
    check_packed(mask, grad, 1)
    return cpu.select(mask, grad)


def _select_cuda(mask: Tensor, grad: Tensor) -> Tensor:
    if grad.dtype == torch.float64:
        return select_reference(mask, grad)
    check_contiguous(grad)
    check_packed(mask, grad, 1)
    return cuda.select(mask, grad)


def _select_fake(mask: Tensor, grad: Tensor) -> Tensor:
    check_contiguous(grad)
    check_packed(mask, grad, 1)
    return torch.empty_like(grad.contiguous())


define("relu_mask(Tensor x) -> (Tensor, Tensor)", {"CPU": _relu_cpu, "CUDA": _relu_cuda}, _relu_fake)
define(
    "relu_mask_(Tensor(a!) x) -> Tensor",
    {"CPU": _relu_cpu_in_place, "CUDA": _relu_cuda_in_place},
    _relu_fake_in_place,
)
define("mask_select(Tensor mask, Tensor grad) -> Tensor", {"CPU": _select_cpu, "CUDA": _select_cuda}, _select_fake)

_ops = torch.ops.actbench


def relu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ReLU of a contiguous tensor and its packed mask."""
    found: tuple[Tensor, Tensor] = _relu_cpu(x) if direct(x) else _ops.relu_mask.default(x)
    return found


def relu_(x: Tensor) -> Tensor:
    """Write ReLU of a contiguous tensor over it and return its packed mask."""
    mask: Tensor = _ops.relu_mask_.default(x)
    return mask


def select(mask: Tensor, grad: Tensor) -> Tensor:
    """Return a contiguous gradient where the bits of a mask are 1, and zero elsewhere."""
    if type(mask) is Tensor and direct(grad):
        return _select_cpu(mask, grad)
    found: Tensor = _ops.mask_select.default(mask, grad)
    return found
