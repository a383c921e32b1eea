"""Simulates number formats: rounds outputs of modules, weights and optimizer state to a format.

For outputs and their gradients SmaQ's authors do the same. Weights and state are rounded by step-post-hooks of an
optimizer. The hooks change only parameters that had a gradient in the step: formats are not idempotent, so that others
would drift without training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves, tree_map

from actbench.methods.formats.encoded.form import encoded, takes, through
from actbench.methods.formats.encodings import Encoding, SmaqSimulated
from actbench.packing import Packed, savedtensors
from actbench.packing.hooked.hooks import active
from actbench.packing.refusals import OWN_BACKWARD, first_order, refuse_compiling, refuse_exporting, refuse_second_order

_ONLY_MOVE = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
"""Modules that pass elements on or drop some: the elements were quantized where they were computed."""


def quantized_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules without children that compute something, whose outputs are feature maps."""
    for module in model.modules():
        if not any(module.children()) and not isinstance(module, _ONLY_MOVE):
            yield module


class EncodedOutputs:
    """A forward hook that rounds outputs, their gradients or both to a number format.

    The gradient of a rounded output is passed on to the exact output ("straight through"). Tensors that are too small,
    not floating point or an input of the module stay as they are.

    Args:
        forward: The format of outputs; None leaves them exact.
        maps: The format of their gradients; None leaves these exact.
    """

    uncompilable = ("a model whose feature maps are quantized", "noise is drawn by hooks on its modules")

    def __init__(self, forward: Encoding | None, maps: Encoding | None) -> None:
        self.forward, self.maps = forward, maps

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output of a module, rounded for the model's rest; a ConversionError under ``torch.compile``."""
        refuse_compiling(*self.uncompilable)
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
    """Replaces a tensor by its decoded form, and passes the gradient on to the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Packed) -> Tensor:
        refuse_exporting(*OWN_BACKWARD)
        return torch.empty_like(x).copy_(packed.unpack())  # not a view: views must not be overwritten

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def _lossy(x: Tensor, encoding: Encoding) -> Tensor:
    """Round a tensor to a format; if the result is saved for backward, the same codes are saved."""
    packed = encoded(x, encoding)
    found: Tensor = _StraightThrough.apply(x, packed)
    hooks = active()
    # else the hooks would pack the rounded output once more, with noise of its own
    if hooks is not None and hooks.packer.codec == packed.codec:
        hooks.packer.stands_for(found, packed)
    return found


class RoundedWeights:
    """Rounds each stepped parameter of two dimensions or more to a format; biases and norms stay exact.

    No exact copy is kept, so rounding should be stochastic: rounding to the nearest loses small updates.
    """

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def __call__(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Round the weights of an optimizer that has stepped."""
        _round(_stepped(optimizer), self.encoding)


@contextmanager
def rounded(parameters: Iterable[Tensor], encoding: Encoding) -> Iterator[None]:
    """Round parameters as :class:`RoundedWeights` does after a step inside the context, and restore them at its end."""
    exact = [(parameter, parameter.detach().clone()) for parameter in parameters if _is_weight(parameter)]
    try:
        _round((parameter for parameter, _ in exact), encoding)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in exact:
                parameter.copy_(value)


@torch.no_grad()
def _round(parameters: Iterable[Tensor], encoding: Encoding) -> None:
    for parameter in parameters:
        if _is_weight(parameter):
            parameter.copy_(through(parameter, encoding))


def _is_weight(parameter: Tensor) -> bool:
    return parameter.dim() > 1 and takes(parameter)


class RoundedState:
    """Rounds each tensor of a stepped parameter's state to a format; second moments stay at least zero."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self._of_squares = encoding
        if isinstance(encoding, SmaqSimulated):
            self._of_squares = encoding.model_copy(update={"nonnegative": True})

    @torch.no_grad()
    def __call__(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Round the state of an optimizer that has stepped."""
        for parameter in _stepped(optimizer):
            for name, value in optimizer.state.get(parameter, {}).items():
                # counts of steps are tensors too
                if isinstance(value, Tensor) and value.shape == parameter.shape and takes(value):
                    # exp_avg_sq, as torch.optim names second moments, or max_exp_avg_sq
                    value.copy_(through(value, self._of_squares if name.endswith("avg_sq") else self.encoding))


def _stepped(optimizer: optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter
