"""Backward passes that cannot themselves be differentiated, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


class _Refusal(torch.autograd.Function):
    """The identity, with an error for a derivative."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "a second derivative was asked of a layer that keeps less than its input for backward; "
            "take second derivatives of the unconverted model"
        )


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Make the backward of an autograd function raise a RuntimeError when it is differentiated.

    torch's ``once_differentiable`` raises only where the incoming gradient needs a gradient; where it is a constant, as
    at the end of a model, the derivative by the input would be lost without a word.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor) -> Gradients:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            found = backward(ctx, *gradients)
        return tuple(None if gradient is None else _Refusal.apply(gradient.requires_grad_()) for gradient in found)

    return refusing
