"""The training step of a layer on the CPU where nobody looks at its operators: as little besides the kernels as can be.

A tensor of 6 MiB leaves nothing of a program in the caches, and each line of Python after it is fetched anew: what is
20 microseconds in a loop over small tensors is 100 there, a tenth of the step. So what is the same in every step is
looked up and checked when the layer is made, and a step goes straight to the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actbench import savedtensors
from actbench.nn.firstorder import first_order
from actbench.ops import activate, mask, stepwise
from actbench.ops.arguments import check_table
from actbench.ops.cpu import mask as maskkernels
from actbench.ops.cpu import stepwise as stepkernels
from actbench.ops.cpu.halves import KINDS
from actbench.ops.library import direct, unseen


class Kernels(NamedTuple):
    """What a layer calls.

    Attributes:
        forward: From a contiguous tensor on the CPU to the output and the packed codes.
        backward: From the codes and the contiguous gradient of the output, ``grad``, on the CPU, to that of the input.
        operator: The same for whatever tensors these may be.
        levels: float32, on the CPU. Saved beside the codes, as by the operators: where a step is recomputed, as many
            tensors must be saved as in the first, though another one may look on.
    """

    forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    backward: Callable[..., Tensor]
    operator: Callable[..., Tensor]
    levels: Tensor


def masked(levels: Sequence[float]) -> Kernels:
    """Return the kernels of ReLU and its mask, of which the levels are 0 and 1 to whom multiplies."""
    return Kernels(maskkernels.relu, maskkernels.select, mask.select, _constants(levels))


def tabled(function: str, bounds: Sequence[float], levels: Sequence[float], bits: int) -> Kernels:
    """Return the kernels of a function and a table of its derivative, which they keep for themselves.

    Args:
        function: What :mod:`actbench.ops.activate` calls it.
        bounds: ``2**bits - 1`` numbers, ascending.
        levels: ``2**bits`` numbers.
        bits: 1 to 8.

    Raises:
        ValueError: Bounds or levels do not go with the bits.
    """
    borders, factors = _constants(bounds), _constants(levels)
    check_table(borders, factors, bits, (1 << bits) - 1, "bounds")
    check_table(factors, borders, bits, 1 << bits, "levels")
    return Kernels(
        partial(activate.on_cpu, function=function, bounds=borders, bits=bits),
        partial(stepkernels.decode, levels=factors, bits=bits),
        partial(stepwise.decode, levels=factors, bits=bits),
        factors,
    )


def _constants(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


class Straight(torch.autograd.Function):
    """A layer with a tensor that may go :func:`straight` to its kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels) -> Tensor:
        """Return the output; keep the packed codes."""
        output, codes = kernels.forward(x)
        savedtensors.packed(x, codes)
        ctx.kernels, ctx.bytes = kernels, codes.numel()
        ctx.save_for_backward(codes, kernels.levels)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the steps."""
        codes, _ = ctx.saved_tensors
        seen = not (unseen(grad) and codes.is_cpu and codes.numel() == ctx.bytes and codes.is_contiguous())
        take = ctx.kernels.operator if seen else ctx.kernels.backward
        return take(codes, grad=grad.contiguous()), None


def straight(x: Tensor) -> bool:
    """Return whether a tensor may go straight to kernels."""
    return direct(x) and x.dtype in KINDS and x.is_contiguous()
