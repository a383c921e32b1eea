"""Derivatives of activation functions, elementwise on float64 arrays, with torch's names for their parameters."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_QUICK_SLOPE = 1.702
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def logistic(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))``, without an overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def gelu(x: Array) -> Array:
    """Return Phi(x) + x phi(x)."""
    below = 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))
    return np.asarray(below + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def gelu_tanh(x: Array) -> Array:
    """Return the derivative of ``x (1 + tanh u) / 2`` with ``u = sqrt(2 / pi) (x + 0.044715 x**3)``."""
    tanh = np.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x**3))
    slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)
    return np.asarray(0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)


def quick_gelu(x: Array) -> Array:
    """Return the derivative of ``x sigmoid(1.702 x)``."""
    gate = logistic(_QUICK_SLOPE * x)
    return np.asarray(gate + _QUICK_SLOPE * x * gate * (1 - gate))


def silu(x: Array) -> Array:
    """Return the derivative of ``x sigmoid(x)``."""
    gate = logistic(x)
    return np.asarray(gate + x * gate * (1 - gate))


def mish(x: Array) -> Array:
    """Return the derivative of ``x tanh(softplus(x))``."""
    tanh = np.tanh(np.logaddexp(0, x))
    return np.asarray(tanh + x * (1 - tanh * tanh) * logistic(x))


def hardswish(x: Array) -> Array:
    """Return the derivative of ``x relu6(x + 3) / 6``."""
    return np.where(x <= -3, 0.0, np.where(x < 3, x / 3 + 0.5, 1.0))


def elu(x: Array, alpha: float = 1.0) -> Array:
    """Return 1 above zero and ``alpha exp(x)`` below."""
    return np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0)))


def celu(x: Array, alpha: float = 1.0) -> Array:
    """Return 1 above zero and ``exp(x / alpha)`` below."""
    return np.where(x > 0, 1.0, np.exp(np.minimum(x / alpha, 0)))


def selu(x: Array) -> Array:
    """Return the derivative of ELU with the alpha and the scale of SELU."""
    return np.asarray(_SELU_SCALE * elu(x, _SELU_ALPHA))


def softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """Return ``sigmoid(beta x)``, and 1 where ``beta x`` is above the threshold."""
    return np.where(beta * x > threshold, 1.0, logistic(beta * x))


def logsigmoid(x: Array) -> Array:
    """Return ``sigmoid(-x)``."""
    return logistic(-x)


def sigmoid(x: Array) -> Array:
    """Return ``s (1 - s)``."""
    return np.asarray(0.25 / np.cosh(np.clip(0.5 * x, -350, 350)) ** 2)


def tanh(x: Array) -> Array:
    """Return one less ``tanh(x)**2``."""
    return np.asarray(1 / np.cosh(np.clip(x, -350, 350)) ** 2)


def tanhshrink(x: Array) -> Array:
    """Return ``tanh(x)**2``."""
    return np.asarray(np.tanh(x) ** 2)


def softsign(x: Array) -> Array:
    """Return ``1 / (1 + |x|)**2``."""
    return np.asarray(1 / (1 + np.abs(x)) ** 2)
