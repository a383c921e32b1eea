"""Layers whose output and codes one operator gives in a single pass over the input."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from actbench import savedtensors
from actbench.nn.firstorder import first_order
from actbench.nn.layout import as_it_lay, in_order, memory_order, told_apart
from actbench.ops import mask
from actbench.ops.activate import activate

RELU = "relu"


def function_name(layer: nn.Module) -> str | None:
    """Return what the operators call the function that a layer computes, or None where there is none for it.

    Layers of transformers hold the function of torch that they call; those that compute it in another way round
    differently.
    """
    kind = type(layer)
    if kind is nn.ReLU:
        return RELU
    if isinstance(layer, nn.GELU) and kind is nn.GELU:
        return "gelu_tanh" if layer.approximate == "tanh" else "gelu"
    if isinstance(layer, nn.SiLU) and kind is nn.SiLU:
        return None if layer.inplace else "silu"
    if kind.__module__ != "transformers.activations":
        return None
    if kind.__name__ == "SiLUActivation":
        return "silu"
    return _gelu_held(getattr(layer, "act", None))


def _gelu_held(held: Any) -> str | None:
    if held is functional.gelu:
        return "gelu"
    if isinstance(held, functools.partial) and held.func is functional.gelu and not held.args:
        return {(): "gelu", (("approximate", "tanh"),): "gelu_tanh"}.get(tuple(held.keywords.items()))
    return None


class MaskedRelu(torch.autograd.Function):
    """ReLU of which backward knows only where it passed its input on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        """Return ReLU of x; keep uint8 ``(ceil(x.numel() / 8),)``."""
        ctx.order = memory_order(x)
        if inplace:
            ctx.mark_dirty(x)
            output, codes = x, _masked_over(x, ctx.order)
        else:
            output, codes = mask.relu(in_order(x, ctx.order))
        savedtensors.packed(x, codes)
        ctx.save_for_backward(told_apart(codes, ctx.order))
        if inplace or ctx.order is None:
            return output
        # .data: autograd would let nobody change a view that was made in here
        return as_it_lay(output, ctx.order).data

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient where the bits are 1, and zero elsewhere."""
        (codes,) = ctx.saved_tensors
        return as_it_lay(mask.select(codes.view(-1), in_order(grad, ctx.order)), ctx.order), None


class OnePass(torch.autograd.Function):
    """A layer on a contiguous input, not in place; it does little, since it is part of the time of every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: str, steps: Any, bounds: Tensor, levels: Tensor) -> Tensor:
        """Return the output; keep the packed codes and the levels, which belong to the layer."""
        output, codes = activate(x, function, bounds, steps.bits, steps.fold)
        savedtensors.packed(x, codes)
        ctx.steps = steps
        ctx.save_for_backward(codes, levels)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the steps."""
        codes, levels = ctx.saved_tensors
        return ctx.steps.gradient(codes, levels, grad.contiguous()), None, None, None, None


def relu_over(x: Tensor, order: list[int] | None) -> Tensor | None:
    """Write ReLU of x over it and return its packed mask, or None where x has gaps or overlaps in memory.

    Args:
        x: The input.
        order: Its dimensions as they lie in memory; None for contiguous.
    """
    lying = x if order is None else x.permute(order)
    return mask.relu_(lying) if lying.is_contiguous() else None


def _masked_over(x: Tensor, order: list[int] | None) -> Tensor:
    codes = relu_over(x, order)
    if codes is None:  # x has gaps
        output, codes = mask.relu(in_order(x, order))
        x.copy_(as_it_lay(output, order))
    return codes
