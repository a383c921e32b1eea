"""An optimizer that steps within the backward pass."""

from __future__ import annotations

import weakref
from functools import partial
from typing import ClassVar, Final

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from actbench.errors import ConversionError
from actbench.scheme.wrapped import WrappedOptimizer

_KNOWN: Final = ("torch.", "torchao.", "actbench.")


class StepInBackward(WrappedOptimizer):
    """Steps each parameter as soon as a backward pass has made its gradient, and frees that gradient.

    The updates are bit for bit those of the optimizer inside. ``step()`` and ``zero_grad()`` are called as always, once
    after each backward pass: ``step()`` also steps the gradients of parameters that were frozen when this was made,
    which wait for it. Gradients are not there to be looked at, scaled or clipped by the norm of all of them::

        optimizer = StepInBackward(torch.optim.AdamW(model.parameters(), lr=2e-5))

    Args:
        inner: Treats each parameter apart from the others, as all of torch's and torchao's but LBFGS do.

    Raises:
        ConversionError: The optimizer is not known to treat each parameter apart, or has hooks that are to run once a
            step; and in a backward pass, a parameter gets a gradient again before ``step()`` or ``zero_grad()``.
    """

    unscalable: ClassVar[str] = "gradients that are stepped within the backward pass"
    remedy: ClassVar[str] = "leave release out"

    def __init__(self, inner: optim.Optimizer) -> None:
        _check(inner)
        super().__init__(inner)
        self._stepped: set[Tensor] = set()
        step = partial(_step, weakref.ref(self))
        handles = [
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
            for parameter in self.parameters()
            if parameter.requires_grad
        ]
        self._remove = weakref.finalize(self, _remove, handles)
        self._remove.atexit = False

    def hold(self) -> None:
        """Let gradients wait for ``step()`` from now on, as those of the optimizer inside would."""
        self._remove()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and begin another step."""
        self._stepped.clear()
        super().zero_grad(set_to_none)

    def _step(self) -> None:
        self._stepped.clear()
        if any(parameter.grad is not None for parameter in self.parameters()):
            self.inner.step()

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter) -> None:
        """Step a parameter while no other has a gradient: optimizers leave those without one alone."""
        if parameter in self._stepped:
            raise ConversionError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient again after it was stepped within the "
                "backward pass: release does not go with gradients that several backward passes add up, nor with "
                "re-entrant checkpointing of a block that is called twice; call optimizer.step() after each backward "
                "pass, or leave release out"
            )
        self._stepped.add(parameter)
        waiting = [(other, other.grad) for other in self.parameters() if other.grad is not None]
        for other, _ in waiting:
            if other is not parameter:
                other.grad = None
        self.inner.step()
        for other, gradient in waiting:
            other.grad = None if other is parameter else gradient


def _step(optimizer: weakref.ref[StepInBackward], parameter: nn.Parameter) -> None:
    found = optimizer()
    if found is not None:
        found._step_one(parameter)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _check(inner: optim.Optimizer) -> None:
    name = type(inner).__name__
    if isinstance(inner, optim.LBFGS | WrappedOptimizer) or not type(inner).__module__.startswith(_KNOWN):
        raise ConversionError(
            f"parameters cannot be stepped one by one by {name}, which may need the gradients of all at once; use an "
            "optimizer of torch.optim but LBFGS, of torchao or of actbench.optim, or leave release out"
        )
    if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
        raise ConversionError(
            f"hooks are registered on {name} that run once a step (simulated formats of weights and state are such); "
            "they would run once a parameter: leave them or release out"
        )
