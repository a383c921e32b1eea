"""The training step of a layer on the CPU where nobody looks at its operators: as little besides the kernels as can be.

A tensor of 6 MiB leaves nothing of a program in the caches, and each line of Python after it is fetched anew: what is
20 microseconds in a loop over small tensors is 100 there, a tenth of the step. So what is the same in every step is
looked up and checked before the first, and a step goes straight to the kernels.

As many tensors are saved as by the operators: where a step is recomputed, another one may look on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, uint8

from actbench import savedtensors
from actbench.nn.firstorder import refuse_second_order
from actbench.ops import activate, mask, stepwise
from actbench.ops.arguments import check_table
from actbench.ops.cpu.mask import relu, select
from actbench.ops.cpu.stepwise import decode
from actbench.ops.library import direct


class Masked(torch.autograd.Function):
    """ReLU of a contiguous tensor of a type that kernels take, which operators need not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return ReLU; keep the packed mask."""
        output, codes = relu(x)
        if savedtensors.listeners:
            savedtensors.packed(x, codes)
        ctx.save_for_backward(codes)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient where the mask is 1; a mask that hooks made something else of is for operators."""
        if is_grad_enabled():
            refuse_second_order()
        (codes,) = ctx.saved_tensors
        as_many = codes.numel() == (grad.numel() + 7) // 8
        as_kept = as_many and type(codes) is Tensor and codes.dtype == uint8 and codes.is_contiguous() and codes.is_cpu
        choose = select if as_kept and direct(grad) else mask.select
        return (choose(codes, grad.contiguous()),)


class Kernels(NamedTuple):
    """What a layer calls.

    Attributes:
        forward: From a contiguous tensor on the CPU to the output and the packed codes.
        backward: From the codes and the contiguous gradient of the output, ``grad``, on the CPU, to that of the input.
        operator: The same for whatever tensors these may be.
        levels: float32, of the layer; saved beside the codes.
    """

    forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    backward: Callable[..., Tensor]
    operator: Callable[..., Tensor]
    levels: Tensor


def tabled(function: str, bounds: Tensor, levels: Tensor, bits: int) -> Kernels:
    """Return the kernels of a function and a table of its derivative.

    Args:
        function: What :mod:`actbench.ops.activate` calls it.
        bounds: float32 ``(2**bits - 1,)``, ascending, on the CPU.
        levels: float32 ``(2**bits,)``, on the CPU.
        bits: 1 to 8.

    Raises:
        ValueError: Bounds or levels do not go with the bits.
    """
    check_table(bounds, levels, bits, (1 << bits) - 1, "bounds")
    check_table(levels, bounds, bits, 1 << bits, "levels")
    return Kernels(
        partial(activate.on_cpu, function=function, bounds=bounds, bits=bits),
        partial(decode, levels=levels, bits=bits),
        partial(stepwise.decode, levels=levels, bits=bits),
        levels,
    )


class Tabled(torch.autograd.Function):
    """The same for a function and a table of its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels) -> Tensor:
        """Return the output; keep the packed codes."""
        output, codes = kernels.forward(x)
        if savedtensors.listeners:
            savedtensors.packed(x, codes)
        ctx.kernels, ctx.bytes = kernels, codes.numel()
        ctx.save_for_backward(codes, kernels.levels)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the steps; codes of which hooks made something else are for operators to refuse."""
        if is_grad_enabled():
            refuse_second_order()
        codes, _ = ctx.saved_tensors
        as_many = codes.numel() == ctx.bytes
        as_kept = as_many and type(codes) is Tensor and codes.dtype == uint8 and codes.is_contiguous() and codes.is_cpu
        take = ctx.kernels.backward if as_kept and direct(grad) else ctx.kernels.operator
        return take(codes, grad=grad.contiguous()), None


apply_mask: Callable[[Tensor], Tensor] = super(torch.autograd.Function, Masked).apply
apply_table: Callable[[Tensor, Kernels], Tensor] = super(torch.autograd.Function, Tabled).apply
"""What ``apply`` comes to where no function is transformed; ``direct`` has asked that of the tensor."""
