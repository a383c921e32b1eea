"""Weights and optimizer state that are made what a number format leaves of them after each step: simulated.

These are step-post-hooks of an optimizer. They touch parameters that had a gradient in the step: formats are not
idempotent, and others would drift without being trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim

from actbench.codecs.encodings import Encoding, SmaqSimulated
from actbench.nn.encoded.form import takes, through


class RoundedWeights:
    """Leaves of each stepped parameter of two dimensions or more what a format does; biases and norms stay whole.

    There is no exact copy beside it, so rounding should be stochastic: to the nearest, small updates are lost.

    Args:
        encoding: The format.
    """

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def __call__(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Round the weights of an optimizer that has stepped."""
        _round(_stepped(optimizer), self.encoding)


@contextmanager
def rounded(parameters: Iterable[Tensor], encoding: Encoding) -> Iterator[None]:
    """Let parameters be rounded as after a step, and at the end of the context be what they were.

    Args:
        parameters: Of which those are rounded that :class:`RoundedWeights` rounds once they have a gradient.
        encoding: The format.
    """
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
    """Leaves of each tensor of a stepped parameter's state what a format does, second moments at least zero.

    Args:
        encoding: The format.
    """

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
                if isinstance(value, Tensor) and value.shape == parameter.shape and takes(value):
                    value.copy_(through(value, self._of_squares if name.endswith("avg_sq") else self.encoding))


def _stepped(optimizer: optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter
