"""ReLU and the other functions with two slopes; one bit an element is packed, and is exact.

Each takes the arguments of its namesake in ``torch.nn.functional``. Output and gradient are the same, bit for bit. If
no gradient is needed, the namesake runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from actbench.methods.actnn.layers.savedinput import needs_codes
from actbench.methods.fewbit import piecewise
from actbench.methods.fewbit.piecewise import Piecewise
from actbench.methods.fewbit.stepwise import RELU, StepwiseGradient
from actbench.ops.library import traced
from actbench.packing.layout import constants


@dataclass(frozen=True)
class _Exact:
    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    inplace: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments)


_MOST_TABLES = 64
_tables: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}
"""At most so many tables: a model has a few, and a search over slopes would leave some on the card for each."""


def _table(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return values as a tensor on the device of ``like``; real tensors are made once for each device."""
    if traced():  # a graph has its own
        return constants(values, like)
    key = (values, like.device)
    if key in _tables and not isinstance(like, FakeTensor):
        return _tables[key]
    made = constants(values, like)
    if not isinstance(made, FakeTensor):
        if len(_tables) == _MOST_TABLES:
            _tables.clear()
        _tables[key] = made
    return made


def _stepwise(x: Tensor, exact: _Exact, steps: Piecewise) -> Tensor:
    if not needs_codes(x, exact.inplace):
        return exact(x)
    bounds, levels = _table(steps.bounds, x), _table(steps.levels, x)
    output: Tensor = StepwiseGradient.apply(x, exact, steps, bounds, levels, None)
    return output


def relu(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002  (torch's names for arguments, here and below)
    """Return ``F.relu``; ``ceil(input.numel() / 8)`` bytes are packed."""
    if not needs_codes(input, inplace):
        return F.relu(input, inplace)
    exact = _Exact(F.relu, (inplace,), inplace)
    output: Tensor = StepwiseGradient.apply(input, exact, piecewise.relu(), None, None, RELU)
    return output


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:  # noqa: A002
    """Return ``F.leaky_relu``; like all below it packs as :func:`relu`, plus two numbers that all calls share."""
    exact = _Exact(F.leaky_relu, (negative_slope, inplace), inplace)
    return _stepwise(input, exact, piecewise.leaky_relu(negative_slope))


def relu6(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002
    """Return ``F.relu6``."""
    return hardtanh(input, 0.0, 6.0, inplace)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:  # noqa: A002
    """Return ``F.hardtanh``."""
    exact = _Exact(F.hardtanh, (min_val, max_val, inplace), inplace)
    return _stepwise(input, exact, piecewise.hardtanh(min_val, max_val))


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002
    """Return ``F.hardsigmoid``."""
    return _stepwise(input, _Exact(F.hardsigmoid, (inplace,), inplace), piecewise.hardsigmoid())


def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:  # noqa: A002
    """Return ``F.hardshrink``."""
    return _stepwise(input, _Exact(F.hardshrink, (lambd,)), piecewise.hardshrink(lambd))


def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:  # noqa: A002
    """Return ``F.softshrink``."""
    return _stepwise(input, _Exact(F.softshrink, (lambd,)), piecewise.softshrink(lambd))


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:  # noqa: A002
    """Return ``F.threshold``."""
    exact = _Exact(F.threshold, (threshold, value, inplace), inplace)
    return _stepwise(input, exact, piecewise.threshold(threshold))
