"""Activation functions by their derivatives, in float64: what the tables of few-bit codecs approximate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actbench.errors import UsageError, boundary, check_argument

Array = NDArray[np.float64]

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
# the two approximations of GELU by Hendrycks and Gimpel (arXiv 1606.08415)
_CUBIC = 0.044715
_QUICK_SLOPE = 1.702
# the constants of Klambauer et al. (arXiv 1706.02515), with the digits of torch's kernels
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


def logistic(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))``, without an overflow."""
    # the same function by tanh, which does not overflow where exp does
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def gelu(x: Array) -> Array:
    """Return the derivative of ``x Phi(x)``: ``Phi(x) + x phi(x)``."""
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
    # logaddexp(0, x) is the softplus of x, without an overflow
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
    # cosh overflows beyond 710; at 350 the derivative is next to 0 already
    return np.asarray(0.25 / np.cosh(np.clip(0.5 * x, -350, 350)) ** 2)


def tanh(x: Array) -> Array:
    """Return one minus ``tanh(x)**2``."""
    return np.asarray(1 / np.cosh(np.clip(x, -350, 350)) ** 2)


def tanhshrink(x: Array) -> Array:
    """Return ``tanh(x)**2``."""
    return np.asarray(np.tanh(x) ** 2)


def softsign(x: Array) -> Array:
    """Return ``1 / (1 + |x|)**2``."""
    return np.asarray(1 / (1 + np.abs(x)) ** 2)


Parameters = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Activation:
    """A scalar function and its derivative, as tables need them.

    Attributes:
        name: Its name in specifications.
        label: Its name for a reader.
        derivative: The derivative, elementwise on float64 arrays.
        even: Whether the derivative is even. Then tables encode ``|x|``, and all codes cover one half line.
        kinks: Where the derivative jumps or bends.
        parameters: Names and values of the function's parameters in torch.
        lasting: Whether name and parameters define the function, so that its tables may be cached on disk.
    """

    name: str
    label: str
    derivative: Callable[[Array], Array]
    even: bool = False
    kinks: tuple[float, ...] = ()
    parameters: Parameters = ()
    lasting: bool = True

    @property
    def key(self) -> str:
        """The name, with the parameters that are not torch's defaults."""
        defaults = ACTIVATIONS[self.name].parameters if self.name in ACTIVATIONS else ()
        changed = [f"{name}={value!r}" for name, value in self.parameters if (name, value) not in defaults]
        return f"{self.name}({','.join(changed)})" if changed else self.name


def activation(name: str, **parameters: float) -> Activation:
    """Return the function ``name`` of :data:`ACTIVATIONS`, with these parameters in place of torch's defaults.

    The parameters are ``alpha`` of elu and celu, and ``beta`` and ``threshold`` of softplus.

    Raises:
        UsageError: The function or the parameter is unknown, or its value leaves no derivative to tabulate.
    """
    if name not in ACTIVATIONS:
        raise UsageError(f"there is no table for a function {name!r}; known: {', '.join(ACTIVATIONS)}")
    known = dict(ACTIVATIONS[name].parameters)
    for key, value in parameters.items():
        if key not in known:
            raise UsageError(f"{name} has no parameter {key!r}; it has {', '.join(known) or 'none'}")
        usable = value == 0 or _SMALLEST <= abs(value) <= _LARGEST
        if not usable or ((name, key) in _POSITIVE and value <= 0):
            raise UsageError(f"{name} with {key}={value:g} has no derivative that a table could stand for")
    values = known | {key: float(value) for key, value in parameters.items()}
    return _with(name, tuple(values.items()))


@functools.cache
def _with(name: str, parameters: Parameters) -> Activation:
    base, values = ACTIVATIONS[name], dict(parameters)
    if parameters == base.parameters:
        return base
    kinks = (values["threshold"] / values["beta"],) if name == "softplus" else base.kinks
    return replace(base, derivative=partial(_FAMILIES[name], **values), kinks=kinks, parameters=parameters)


_FAMILIES: dict[str, Callable[..., Array]] = {"elu": elu, "celu": celu, "softplus": softplus}
_SMALLEST, _LARGEST = 1e-30, 1e30  # magnitudes of parameters
_POSITIVE = {("celu", "alpha"), ("softplus", "beta")}

ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("gelu", "GELU", gelu),
        Activation("gelu_tanh", "GELU (tanh)", gelu_tanh),
        Activation("quick_gelu", "QuickGELU", quick_gelu),
        Activation("silu", "SiLU", silu),
        Activation("mish", "Mish", mish),
        Activation("hardswish", "Hardswish", hardswish, kinks=(-3.0, 3.0)),
        Activation("elu", "ELU", elu, kinks=(0.0,), parameters=(("alpha", 1.0),)),
        Activation("celu", "CELU", celu, kinks=(0.0,), parameters=(("alpha", 1.0),)),
        Activation("selu", "SELU", selu, kinks=(0.0,)),
        Activation("softplus", "Softplus", softplus, kinks=(20.0,), parameters=(("beta", 1.0), ("threshold", 20.0))),
        Activation("logsigmoid", "LogSigmoid", logsigmoid),
        Activation("sigmoid", "Sigmoid", sigmoid, even=True),
        Activation("tanh", "Tanh", tanh, even=True),
        Activation("tanhshrink", "Tanhshrink", tanhshrink, even=True),
        Activation("softsign", "Softsign", softsign, even=True),
    )
}
"""The functions with a table, by name, with torch's default parameters."""


Function = Callable[[Tensor], Tensor]

# that of the tables of a uniform weight
_END = 100.0
_SAMPLES = 16384
_HALVINGS = 60
_MOST_JUMPS = 64


def own_activation(name: str, function: Function) -> Activation:
    """Return a user's function as an :class:`Activation`.

    Args:
        name: Name of the function in messages and tables.
        function: Maps a float64 vector to the activation of each element, by operations that torch can differentiate.

    Raises:
        UsageError: The function fails, is not elementwise, cannot be differentiated, or its derivative is not finite.
    """
    check_argument(name, str, "own_activation", "a name")
    # dense near 0, where activations bend, and out to the end of the domain of tables
    half = np.sinh(np.linspace(0, np.arcsinh(_END), _SAMPLES // 2 + 1)[1:])
    grid = np.concatenate([-half[::-1], half])
    slopes = _derivative(name, function, grid)
    if not np.isfinite(slopes).all():
        raise UsageError(f"the derivative of {name} is not finite at x = {grid[~np.isfinite(slopes)][0]:.6g}")
    # the same numbers elsewhere in another vector: a function of each element does not see the difference
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
    """Return whether two derivatives are equal up to rounding, which differs in and behind whole SIMD vectors."""
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
    """Return where the derivative jumps: halving a steep cell again and again leaves its rise the same."""
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
    # a slope, however steep, would have lost its rise in 60 halvings
    jumped = np.abs(at_high - at_low) > 0.5 * rise[steep]
    # + 0.0 makes zero of a negative zero
    return tuple(np.unique(np.round(high[jumped], 12) + 0.0).tolist())
