"""Backward passes that cannot themselves be differentiated, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


def refuse_second_order(what: str = "a layer that keeps less than its input for backward") -> None:
    """Raise a RuntimeError in a backward pass that makes a graph of itself (``create_graph=True``).

    At once, and not when that graph is differentiated: autograd passes by a node that would raise then, where it leads
    to none of the tensors that a gradient is asked for (``torch.autograd.grad``), and what was packed leads to none.

    Args:
        what: What the second derivative is asked of.

    Raises:
        RuntimeError: The backward pass makes a graph.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a second derivative was asked of {what} (create_graph=True); "
            "take second derivatives of the unconverted model"
        )


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Make the backward of an autograd function raise a RuntimeError where a second derivative may be taken of it.

    torch's ``once_differentiable`` raises when its result is differentiated, and only where the incoming gradient needs
    a gradient; where it is a constant, as at the end of a model, the derivative by the input is lost without a word.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Tensor) -> Gradients:
        refuse_second_order()
        return backward(ctx, *gradients)

    return refusing
