"""Activation functions of a user's own: their derivative by autograd, their jumps by search."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from actbench.codecs.activation import Activation, Array
from actbench.errors import UsageError
from actbench.foreign import boundary

Function = Callable[[Tensor], Tensor]

_END = 100.0
_SAMPLES = 16384
_HALVINGS = 60
_MOST_JUMPS = 64


def own_activation(name: str, function: Function) -> Activation:
    """Return a function as tables need it.

    Args:
        name: What it is called in messages and tables.
        function: From a float64 vector to the activation of each element, in operations that torch can differentiate.

    Raises:
        UsageError: It fails, is not elementwise, cannot be differentiated, or has a derivative that is not finite.
    """
    half = np.sinh(np.linspace(0, np.arcsinh(_END), _SAMPLES // 2 + 1)[1:])
    grid = np.concatenate([-half[::-1], half])
    slopes = _derivative(name, function, grid)
    if not np.isfinite(slopes).all():
        raise UsageError(f"the derivative of {name} is not finite at x = {grid[~np.isfinite(slopes)][0]:.6g}")
    if not _equal(_derivative(name, function, grid[1::3]), slopes[1::3]):
        raise UsageError(f"{name} is not elementwise: its derivative at one element depends on the others")

    def derivative(x: Array) -> Array:
        return _derivative(name, function, x)

    return Activation(
        name,
        name.rpartition(":")[2],
        derivative,
        even=_equal(slopes, slopes[::-1]),
        kinks=_jumps(derivative, grid, slopes),
        lasting=False,
    )


def _equal(one: Array, other: Array) -> bool:
    """Return whether two derivatives are equal but for rounding, which differs in and after whole vectors."""
    return np.allclose(one, other, rtol=1e-9, atol=1e-12)


def _derivative(name: str, function: Function, x: Array) -> Array:
    leaf = torch.from_numpy(np.ascontiguousarray(x).reshape(-1)).requires_grad_()
    with torch.enable_grad():
        with boundary(f"{name} fails on a float64 vector", UsageError):
            y = function(leaf)
        if not isinstance(y, Tensor) or y.shape != leaf.shape:
            found = f"a tensor {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise UsageError(f"{name} must return one value for each of {leaf.numel()} elements, it returned {found}")
        if not y.requires_grad:
            raise UsageError(f"{name} cannot be differentiated: write it in operations of torch, without detach()")
        (slope,) = torch.autograd.grad(y.sum(), leaf)
    return slope.numpy().reshape(x.shape)


def _jumps(derivative: Callable[[Array], Array], x: Array, slopes: Array) -> tuple[float, ...]:
    """Return where the derivative jumps: where halving a steep cell again and again leaves it as steep."""
    rise = np.abs(np.diff(slopes))
    steep = np.argsort(rise)[::-1][:_MOST_JUMPS]
    steep = np.sort(steep[rise[steep] > 1e-4 * max(np.ptp(slopes), 1e-300)])
    if not len(steep):
        return ()
    low, high, at_low, at_high = x[steep], x[steep + 1], slopes[steep], slopes[steep + 1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        value = derivative(middle)
        left = np.abs(value - at_low) >= np.abs(at_high - value)
        low, at_low = np.where(left, low, middle), np.where(left, at_low, value)
        high, at_high = np.where(left, middle, high), np.where(left, value, at_high)
    jumped = np.abs(at_high - at_low) > 0.5 * rise[steep]
    return tuple(np.unique(np.round(high[jumped], 12) + 0.0).tolist())
