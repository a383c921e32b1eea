"""What a training step refuses of an optimizer."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn, optim

from actbench.errors import MeasurementError, ModelError, UsageError


def innermost(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return the optimizer that computes the updates, inside any wrapper."""
    found: Any = optimizer
    while isinstance(inner := getattr(found, "inner", None), optim.Optimizer):
        found = inner
    return found  # type: ignore[no-any-return]


def refuse_frozen(module: nn.Module) -> None:
    """Raise a ModelError if no parameter of a model is trained."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(
            f"{type(module).__name__} has no parameter that needs a gradient: are all of them frozen? Unfreeze those "
            "to train by requires_grad_(True); lora freezes a model itself"
        )


def refuse_unsteppable(optimizer: optim.Optimizer, module: nn.Module) -> None:
    """Raise an error for an optimizer of a model that a training step cannot step.

    Raises:
        ModelError: No parameter of the model is trained.
        MeasurementError: The optimizer holds none of those that are.
        UsageError: Its step needs a closure.
    """
    name = type(optimizer).__name__
    if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
        refuse_frozen(module)
        raise MeasurementError(
            f"the {name} holds no parameter that is trained: it was made before a scheme "
            "froze its parameters and added new ones; give a function from the model to its optimizer"
        )
    kind = type(optimizer)
    if kind.__module__.startswith("actbench."):  # a wrapper of ours hands the step on
        kind = type(innermost(optimizer))
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{kind.__name__} needs a closure that runs the model again within its step, and a training step here runs "
            "it once; take an optimizer that steps without one, such as torch.optim.AdamW"
        )
