"""Gated units ``f(x) = x gate(x)`` with ``gate(x) + gate(-x) = 1``: GELU, SiLU and the like.

Two ways to save less for backward than a table of the derivative: :func:`mixture`, the nearest sum of three ReLUs, and
:func:`inversion`, which finds the derivative from the output and the branch of the input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from actbench.methods.fewbit.activation import ACTIVATIONS
from actbench.methods.fewbit.tables import Table

Gate = Callable[[Tensor], Tensor]

# as in activation: Hendrycks and Gimpel, arXiv 1606.08415
_CUBIC = 0.044715
GATES: dict[str, Gate] = {
    "gelu": lambda x: 0.5 * torch.special.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + _CUBIC * x**3)),
    "quick_gelu": lambda x: torch.sigmoid(1.702 * x),
    "silu": torch.sigmoid,
}
"""The gates by the name of the function, on float64 tensors."""

# beyond it relu and each function differ by less than 2e-16
_END = 40.0
_POINTS = 1 << 18
_CELLS = 2048
# at these ends an output is 0, and a derivative 1, to the last digit or two of a double
_FAR_LEFT = -60.0
_FAR_RIGHT = 40.0


@functools.cache
@_disable_current_modes()  # kept for the whole process: nothing of it may come from a simulated card
def mixture(function: str) -> Table:
    """Return the 2-bit table of the sum of three ReLUs that is nearest to a function.

    ``arXiv 2406.16282`` minimises ``int (f(x) - sum_i a_i relu(x - c_i))**2 dx`` with ``sum_i a_i = 1`` (and, since the
    integral is over the whole line, ``sum_i a_i c_i = 0``). As ``f - relu`` is even, so is the best approximation: ``c
    = (-c, 0, c)`` and ``a = (-a, 1 + 2 a, -a)``, which differs from relu by ``-a max(c - |x|, 0)``. For each c the best
    a is a quotient of integrals; c is found by golden section.

    The borders are ``(-c, 0, c)``, the levels ``(0, -a, 1 + a, 1)``; ``error`` is the error of the function, not of the
    derivative.
    """
    h = _END / _POINTS
    x = (torch.arange(_POINTS, dtype=torch.float64, device="cpu") + 0.5) * h
    short = x * GATES[function](-x)  # relu - f, on the half line
    sums, moments = (short * h).cumsum(0), (short * x * h).cumsum(0)

    def slope(c: float) -> float:
        last = math.ceil(c / h - 0.5) - 1  # of the points below c
        return float(c * sums[last] - moments[last]) / (c**3 / 3)  # the integral of (relu - f) max(c - x, 0)

    def gained(c: float) -> float:
        return slope(c) ** 2 * c**3 / 3

    c = _argmax(gained, 0.5, 20.0)
    a = slope(c)
    error = 2 * (float((short * short).sum() * h) - gained(c))
    return Table(function=function, bits=2, fold=False, borders=(-c, 0.0, c), levels=(0.0, -a, 1 + a, 1.0), error=error)


def _argmax(of: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function has its only maximum, by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-7:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if of(left) > of(right) else (left, high)
    return (low + high) / 2


@dataclass(frozen=True)
class Inversion:
    """The derivative of a gated unit as a function of its output, on either side of its minimum.

    Attributes:
        turn: The x of the minimum.
        least: The output there.
        left: The derivative at equal steps of :func:`left_place` from 0 to 1, ``(n + 1,)`` in float64.
        right: The derivative at equal steps of ``sqrt(y - least)`` from 0 to ``reach``; above it the derivative is 1.
    """

    function: str
    turn: float
    least: float
    left: tuple[float, ...]
    right: tuple[float, ...]
    reach: float


@functools.cache
@_disable_current_modes()
def inversion(function: str) -> Inversion:
    """Return the inverse of a gated unit, solved by bisection in float64 on both branches."""
    gate, derivative = GATES[function], ACTIVATIONS[function].derivative

    def value(x: Tensor) -> Tensor:
        return x * gate(x)

    def slope(x: Tensor) -> Tensor:
        return torch.from_numpy(derivative(x.numpy()))

    double = functools.partial(torch.tensor, dtype=torch.float64, device="cpu")
    # between these the derivative changes its sign once, at the minimum
    turn = float(_root(slope, double([-3.0]), double([0.0])))
    least = float(value(double(turn)))
    steps = torch.linspace(0, 1, _CELLS + 1, dtype=torch.float64, device="cpu")
    start, left_end, right_end = (torch.full_like(steps, x) for x in (turn, _FAR_LEFT, _FAR_RIGHT))
    # left_place(y) = 1 - sqrt(1 - sqrt(1 - y / least)), solved for y
    share = 1 - (1 - (1 - steps) ** 2) ** 2
    on_left = _root(lambda x: least * share - value(x), left_end, start)
    reach = math.sqrt(_FAR_RIGHT / 2 - least)
    on_right = _root(lambda x: value(x) - (least + (reach * steps) ** 2), start, right_end)
    left, right = slope(on_left), slope(on_right)
    # exact values, in place of what bisection leaves of them
    left[0] = right[0] = left[-1] = 0.0
    return Inversion(function, turn, least, tuple(left.tolist()), tuple(right.tolist()), reach)


def _root(rising: Gate, low: Tensor, high: Tensor) -> Tensor:
    """Return where a rising function crosses zero, elementwise, by bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        above = rising(middle) > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2
