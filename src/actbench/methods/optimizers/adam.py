"""Adam, one parameter after the other, in a form that other optimizers change for matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch import Tensor, optim

from actbench.scheme.wrapped import called

State = dict[str, Any]
Group = dict[str, Any]

_DEFAULTS: Final = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


_OF_TORCH = ("_optimizer_", "_zero_grad", "_warned")
"""What names of torch's own attributes begin with, which it sets anew."""


class MatrixAdam(optim.Optimizer):
    """Adam or AdamW; a subclass computes the updates of some matrices in another way.

    Parameters are stepped one after the other. State has the type of the gradients. The others' updates are those of
    torch's Adam, to rounding.

    Args:
        params: Parameters, or groups of them, as in torch.
        matrices: The parameters that the subclass updates.
        decoupled: Whether weight decay is AdamW's.
        options: ``lr``, ``betas``, ``eps`` and ``weight_decay``, as in torch; by default Adam's.
    """

    def __init__(self, params: Any, matrices: Collection[Tensor], *, decoupled: bool = True, **options: Any) -> None:
        super().__init__(params, {**_DEFAULTS, **options})
        self.decoupled = decoupled
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        self.matrices = {parameter: index for index, parameter in enumerate(order) if parameter in set(matrices)}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: torch's own leaves out what a subclass of its optimizer holds."""
        own = {name: value for name, value in vars(self).items() if not name.startswith(_OF_TORCH)}
        return {**super().__getstate__(), **own}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run a step; return what the closure does."""
        loss = called(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        if group["weight_decay"] and self.decoupled:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state: State = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        if parameter in self.matrices:
            update = self._update(parameter, gradient, group, state)
        else:
            update = direction(gradient, group, state)
        parameter.add_(update, alpha=-group["lr"])

    def _update(self, parameter: Tensor, gradient: Tensor, group: Group, state: State) -> Tensor:
        """Return what is subtracted from a matrix, times the learning rate: its shape, a tensor of its own."""
        raise NotImplementedError


def direction(gradient: Tensor, group: Group, state: State) -> Tensor:
    """Put a gradient into the moments ``exp_avg`` and ``exp_avg_sq``, and return what Adam subtracts."""
    beta1, beta2 = group["betas"]
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return adam_ratio(state["exp_avg"], state["exp_avg_sq"], group, state["step"])


def adam_ratio(first: Tensor, second: Tensor, group: Group, step: int) -> Tensor:
    """Return the first moment divided by the root of the second, both without their bias towards zero."""
    beta1, beta2 = group["betas"]
    divisor = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    return first.div(divisor).div_(1 - beta1**step)
