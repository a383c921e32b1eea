"""Functions whose output and codes one operator gives in a single pass over the input."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from actbench.nn.layout import as_it_lay
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


def fused(
    x: Tensor, function: str, order: list[int] | None, inplace: bool, bounds: Tensor, bits: int, fold: bool
) -> tuple[Tensor, Tensor] | None:
    """Return a function of x and the packed codes of x by one operator, or None where that cannot be.

    Args:
        x: The input.
        function: As :func:`function_name` gives it.
        order: Dimensions of x as they lie in memory; None for contiguous.
        inplace: Write the function over x, and return x.
        bounds: float32 ``(2**bits - 1,)``, ascending; ReLU reads none, since its code is its mask.
        bits: Bits of a code.
        fold: Encode ``|x|``.
    """
    if function != RELU:
        return None if inplace or order is not None else activate(x, function, bounds, bits, fold)
    lying = x if order is None else x.permute(order)
    if inplace and lying.is_contiguous():
        return x, mask.relu_(lying)
    output, codes = mask.relu(lying.contiguous())
    output = as_it_lay(output, order)
    if inplace:  # x has gaps
        return x.copy_(output), codes
    # .data: autograd would let nobody change a view that was made in its function
    return (output if order is None else output.data), codes
