"""Quantizing what modules return, and the gradients of it, as SmaQ's authors do: nothing is stored by that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from actbench import savedtensors
from actbench.codecs.encodings import Encoding
from actbench.nn.eager import refuse_compiling
from actbench.nn.encoded.form import encoded, takes, through
from actbench.nn.encoded.keeper import EncodedKeeper
from actbench.nn.firstorder import first_order, refuse_second_order
from actbench.nn.hooked.running import active
from actbench.nn.keeping import Kept

_ONLY_MOVE = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
"""Modules that leave elements as they are, or drop some: these were quantized where they were computed."""


def quantized_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules without children that compute something, whose outputs are feature maps."""
    for module in model.modules():
        if not any(module.children()) and not isinstance(module, _ONLY_MOVE):
            yield module


class EncodedOutputs:
    """A forward hook by which outputs, their gradients or both become what a number format leaves of them.

    The gradient of a quantized output is passed on to the exact one ("straight through"). Tensors that are too small,
    of no floating-point type or an input of the module stay as they are.

    Args:
        forward: The format of outputs; None leaves them exact.
        maps: The format of their gradients; None leaves these exact.
    """

    def __init__(self, forward: Encoding | None, maps: Encoding | None) -> None:
        self.forward, self.maps = forward, maps

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output of a module as the rest of the model is given it.

        Raises:
            ConversionError: Under ``torch.compile``.
        """
        refuse_compiling("a model whose feature maps are quantized", "noise is drawn by hooks on its modules")
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]

        def quantized(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not takes(leaf) or any(leaf is one for one in given):
                return leaf
            found = leaf if self.forward is None else _lossy(leaf, self.forward)
            if self.maps is not None and found.requires_grad:
                savedtensors.acted(self)
                found.register_hook(self._map)  # type: ignore[no-untyped-call]
            return found

        return tree_map(quantized, output)

    def _map(self, gradient: Tensor) -> Tensor:
        refuse_second_order("a model whose gradient maps are quantized")
        assert self.maps is not None
        return through(gradient, self.maps) if takes(gradient) else gradient


class _StraightThrough(torch.autograd.Function):
    """What was kept of a tensor in place of it; its gradient is the tensor's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept) -> Tensor:
        return torch.empty_like(x).copy_(kept.form.restore(kept.parts))  # no view, which must not be overwritten

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def _lossy(x: Tensor, encoding: Encoding) -> Tensor:
    """Return what a format leaves of a tensor; where that is saved for backward, it is kept as these very codes."""
    kept = encoded(x, encoding)
    found: Tensor = _StraightThrough.apply(x, kept)
    hooks = active()
    if hooks is not None and isinstance(hooks.keeper, EncodedKeeper) and hooks.keeper.encoding == encoding:
        hooks.keeper.stands_for(found, kept)
    return found
