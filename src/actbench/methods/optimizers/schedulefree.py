"""AdamW without a schedule of the learning rate (Defazio et al., arXiv 2405.15682)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, optim

from actbench.errors import ConversionError
from actbench.methods.optimizers.adam import Group, State
from actbench.scheme.wrapped import TRAIN_MODE, called

_DEFAULTS: Final = {"lr": 2.5e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


class ScheduleFreeAdamW(optim.Optimizer):
    """AdamW that steps z, averages it in x, and takes gradients at y between the two, by algorithm 1 of the paper.

    ::

        y = (1 - b1) z + b1 x
        v = b2 v + (1 - b2) g g                    g is the gradient at y
        r = lr sqrt(1 - b2^t)
        z = z - r (g / (sqrt(v) + eps) + decay y)
        x = (1 - c) x + c z                        c = r^2 / (the sum of r^2 up to this step)

    Parameters hold y. :meth:`eval` puts x in its place, to evaluate or to save, and :meth:`train` puts y back. State is
    z (``z``) and v (``exp_avg_sq``), each like the parameter, and two numbers. Parameters are stepped one after the
    other, with one temporary of a parameter's size. Warm the learning rate up by a scheduler, as the paper does.

    Args:
        params: Parameters, or groups of them, as in torch.
        decoupled: Whether weight decay is AdamW's; else ``decay y`` is part of the gradient.
        options: ``lr``, ``betas``, ``eps`` and ``weight_decay``, as in torch.

    Raises:
        ValueError: b1 is 0, so that y says nothing of x.
    """

    def __init__(self, params: Any, *, decoupled: bool = True, **options: Any) -> None:
        super().__init__(params, {**_DEFAULTS, **options, "decoupled": decoupled, TRAIN_MODE: True})

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch; raise a ValueError if its b1 is 0."""
        if param_group.get("betas", self.defaults["betas"])[0] == 0:
            raise ValueError("schedule-free AdamW needs a first beta above 0, which blends two sequences of weights")
        super().add_param_group(param_group)

    def eval(self) -> None:
        """Put the averaged weights x into the parameters; nothing where they are there already."""
        self._show(training=False)

    def train(self) -> None:
        """Put the weights y, at which gradients are taken, into the parameters; nothing where they are there."""
        self._show(training=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run a step; return what the closure does.

        Raises:
            ConversionError: The parameters hold averaged weights.
        """
        loss = called(closure)
        for group in self.param_groups:
            if not group[TRAIN_MODE]:
                raise ConversionError("schedule-free AdamW: the parameters hold averaged weights; call train() first")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, y: Tensor, gradient: Tensor, group: Group) -> None:
        state: State = self.state[y]
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        if "z" not in state:
            state.update(step=0, weight_sum=0.0, z=y.clone(), exp_avg_sq=torch.zeros_like(y))
        if decay and not group["decoupled"]:
            gradient = gradient.add(y, alpha=decay)
        state["step"] += 1
        rate = group["lr"] * math.sqrt(1 - beta2 ** state["step"])
        state["weight_sum"] += rate**2
        share = rate**2 / state["weight_sum"] if rate else 0.0
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = state["exp_avg_sq"].sqrt().add_(group["eps"])
        torch.div(gradient, update, out=update)
        if decay and group["decoupled"]:
            update.add_(y, alpha=decay)
        # what the new z and x make of y, in which x is not needed
        y.lerp_(state["z"], share).sub_(update, alpha=rate * (1 - beta1 * (1 - share)))
        state["z"].sub_(update, alpha=rate)

    @torch.no_grad()
    def _show(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group[TRAIN_MODE] is training:
                continue
            beta1 = group["betas"][0]
            for parameter in group["params"]:
                if "z" in self.state.get(parameter, {}):
                    parameter.lerp_(self.state[parameter]["z"], 1 - beta1 if training else 1 - 1 / beta1)
            group[TRAIN_MODE] = training
