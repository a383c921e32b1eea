"""Activation functions by their derivatives, in float64: what the tables of few-bit codecs approximate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_QUICK_SLOPE = 1.702


@dataclass(frozen=True)
class Activation:
    """A scalar function, as far as a table of its derivative needs to know it.

    Attributes:
        name: Its name in specifications.
        label: Its name for a reader.
        derivative: The derivative, elementwise on float64 arrays.
        even: Whether the derivative is even; then ``|x|`` is encoded and all codes serve one half line.
        kinks: Where the derivative jumps or bends.
    """

    name: str
    label: str
    derivative: Callable[[Array], Array]
    even: bool = False
    kinks: tuple[float, ...] = ()


def _gelu_derivative(x: Array) -> Array:
    """Return Phi(x) + x phi(x)."""
    below = 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))
    return np.asarray(below + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def _gelu_tanh_derivative(x: Array) -> Array:
    """Return the derivative of ``x (1 + tanh u) / 2`` with ``u = sqrt(2 / pi) (x + 0.044715 x**3)``."""
    tanh = np.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x**3))
    slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    return np.asarray(0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)


def _quick_gelu_derivative(x: Array) -> Array:
    """Return the derivative of ``x sigmoid(1.702 x)``."""
    gate = 0.5 * (1 + np.tanh(0.5 * _QUICK_SLOPE * x))
    return np.asarray(gate + _QUICK_SLOPE * x * gate * (1 - gate))


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("gelu", "GELU", _gelu_derivative),
        Activation("gelu_tanh", "GELU (tanh)", _gelu_tanh_derivative),
        Activation("quick_gelu", "QuickGELU", _quick_gelu_derivative),
    )
}
"""The functions with a table, by name."""
