"""Layers whose output and codes one operator gives in a single pass over the input."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from actbench import savedtensors
from actbench.nn.firstorder import first_order
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


class OnePassMask(torch.autograd.Function):
    """ReLU of a contiguous input, not in place; it does little, since it is part of the time of every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return ReLU; keep the packed mask."""
        output, codes = mask.relu(x)
        savedtensors.packed(x, codes)
        ctx.save_for_backward(codes)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        """Return the gradient where the mask is 1."""
        (codes,) = ctx.saved_tensors
        return (mask.select(codes, grad.contiguous()),)


class OnePass(torch.autograd.Function):
    """The same for a layer with a table of its derivative."""

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
