"""Layers whose output and codes one operator gives in a single pass over the input."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

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


def one_pass(
    function: str | None, x: Tensor, order: list[int] | None, inplace: bool, bounds: Tensor, bits: int, fold: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the output and the packed codes of a layer, or None where its parts must be computed one by one.

    Args:
        function: What :func:`function_name` gives.
        x: The input.
        order: Its dimensions as they lie in memory; None for contiguous.
        inplace: Whether the output takes the place of the input, and is x itself.
        bounds: As for the encoder; ReLU has its own.
        bits: 1 to 8.
        fold: Whether the magnitude is encoded.
    """
    if function is None:
        return None
    if inplace:
        lying = x if order is None else x.permute(order)
        return (x, mask.relu_(lying)) if function == RELU and lying.is_contiguous() else None
    if order is not None:  # the output would be a view, which autograd lets no one change in place
        return None
    found: tuple[Tensor, Tensor] = mask.relu(x) if function == RELU else activate(x, function, bounds, bits, fold)
    return found
