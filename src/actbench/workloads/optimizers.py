"""The optimizers of workloads: torch's by name, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from actbench.errors import ModelError
from actbench.results.records import OPTIMIZER, Optimizer
from actbench.setup import MakeOptimizer

# Rates that fine-tuning runs commonly use; no byte and no second depends on them.
ADAM_RATE = 2e-5
SGD_RATE = 1e-2
_OPTIMIZERS: dict[Optimizer, tuple[Callable[..., optim.Optimizer], dict[str, float]]] = {
    "adamw": (optim.AdamW, {"lr": ADAM_RATE}),
    "adam": (optim.Adam, {"lr": ADAM_RATE}),
    "sgd": (optim.SGD, {"lr": SGD_RATE}),
    "sgd-momentum": (optim.SGD, {"lr": SGD_RATE, "momentum": 0.9}),
}


def make_optimizer(name: Optimizer | None, **options: float) -> MakeOptimizer:
    """Return the function that makes the named optimizer (AdamW for None) for the trained parameters of a model."""
    kind, usual = _OPTIMIZERS[name or OPTIMIZER]

    def make(module: nn.Module) -> optim.Optimizer:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return kind(trained, **{**usual, **options})

    return make


def made(optimizer: optim.Optimizer, module: nn.Module, twins: Mapping[Tensor, Tensor], spec: str) -> MakeOptimizer:
    """Return what gives an optimizer that was made already, each time as it came.

    Args:
        optimizer: Of parameters of the model; it is given their twins in place.
        module: The model, with the twins as its parameters.
        twins: What each parameter has become: itself, or its fake form.
        spec: The model specification, for messages.

    Raises:
        ModelError: It holds parameters that are not of the model.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [twins.get(parameter, parameter) for parameter in group["params"]]
    check(optimizer, module, spec)
    for parameter in [parameter for parameter in optimizer.state if parameter in twins]:
        optimizer.state[twins[parameter]] = optimizer.state.pop(parameter)
    leaves, tree = tree_flatten(optimizer.state_dict() if optimizer.state else {})
    begun = [_again(leaf) for leaf in leaves]

    def give(module: nn.Module) -> optim.Optimizer:
        optimizer.state.clear()
        if begun:  # such as Adagrad's, which is there from the beginning; it follows the model's device
            optimizer.load_state_dict(tree_unflatten([again() for again in begun], tree))
        return optimizer

    return give


def _again(leaf: Any) -> Callable[[], Any]:
    """Return what makes a copy of a part of a state; counters stay numbers that can be read on fake tensors too."""
    if not isinstance(leaf, Tensor):
        return lambda: leaf
    if leaf.dim() or isinstance(leaf, FakeTensor):
        return leaf.clone
    number, dtype = leaf.item(), leaf.dtype
    return lambda: torch.tensor(number, dtype=dtype)


def makes(make: Callable[[nn.Module], Any], run: Callable[[Callable[[], Any]], Any], spec: str) -> MakeOptimizer:
    """Return what calls the user's function from the model to its optimizer and looks at what comes of it.

    Args:
        make: The function.
        run: Calls user code, and names its line in errors.
        spec: The model specification, for messages.
    """

    def checked(module: nn.Module) -> optim.Optimizer:
        found = run(lambda: make(module))
        if not isinstance(found, optim.Optimizer):
            raise ModelError(
                f"{spec}: the fourth value, a function from the model to its optimizer, returned "
                f"{type(found).__name__}; it must return a torch.optim.Optimizer"
            )
        check(found, module, spec)
        return found

    return checked


def check(optimizer: optim.Optimizer, module: nn.Module, spec: str) -> None:
    """Check that an optimizer is of parameters of a model.

    Raises:
        ModelError: It holds others.
    """
    own = set(module.parameters())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in held if parameter not in own]
    if foreign:
        raise ModelError(
            f"{spec}: the {type(optimizer).__name__} that it returns holds {len(foreign)} of {len(held)} parameters "
            f"that are not of the model, the first of shape {tuple(foreign[0].shape)}; make it of model.parameters() "
            "when nothing of the model is replaced any more"
        )
