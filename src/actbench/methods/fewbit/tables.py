"""Few-bit tables: the borders and levels that approximate the derivative of an activation function.

The default is FewBit's objective, a uniform weight over [-100, 100], solved to its optimum. The narrower [-10, 10]
gives a 1 to 10 % smaller integral. But its outer levels, for inputs that are far out, are off 0 and 1 by 2.6e-3 at 3
bits in place of 2e-4, and the scale of the inputs is not known. Where it is known, ``weight="normal"`` with that scale
lowers the error that training sees (3-bit GELU at scale 1: from 0.086 to 0.065 of the gradient).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, FiniteFloat, ValidationError, model_validator

from actbench.errors import UsageError, check_argument
from actbench.methods.fewbit import optimallevels
from actbench.methods.fewbit.activation import Activation, Array, activation
from actbench.model.data import Data
from actbench.ops import rawkernel
from actbench.paths import write_whole

Weight = Literal["uniform", "normal"]

# the domain of the tables that the authors of few-bit backward ship (arXiv 2202.00441)
_UNIFORM_END = 100.0
_NORMAL_END = 10.0  # in standard deviations; what lies beyond weighs 1e-23
_PIECES = 1025  # of the integral over a normal density
_NARROWEST, _WIDEST = 1e-30, 1e32  # width of a domain
_SHARE = 1e-9  # least width of a domain, relative to its ends
_DIGITS = 12  # of borders, so that a border at zero is zero on every machine


class Table(Data):
    """A piecewise-constant derivative: ``levels[i]`` where i borders are strictly below x (``|x|`` if folded).

    Attributes:
        function: The activation function.
        bits: Bits of a code.
        fold: Whether ``|x|`` is encoded.
        borders: Ascending, ``2**bits - 1`` of them.
        levels: ``2**bits`` of them.
        error: The weighted integral of the squared error of the derivative, over both half lines.
    """

    function: str
    bits: int = Field(ge=1, le=8)
    fold: bool
    borders: tuple[FiniteFloat, ...]
    levels: tuple[FiniteFloat, ...]
    error: FiniteFloat

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (len(self.borders), len(self.levels)) != (2**self.bits - 1, 2**self.bits):
            raise ValueError(f"{len(self.borders)} borders and {len(self.levels)} levels at {self.bits} bits")
        if any(left >= right for left, right in zip(self.borders, self.borders[1:], strict=False)):
            raise ValueError("the borders do not ascend")
        return self


def table(
    function: str | Activation,
    bits: int,
    weight: Weight = "uniform",
    scale: float = 1.0,
    domain: tuple[float, float] | None = None,
) -> Table:
    """Return the best table of a function's derivative, from the user's cache where it has been computed before.

    Args:
        function: A name in :data:`actbench.methods.fewbit.activation.ACTIVATIONS`, or what :func:`activation` or
            :func:`own_activation` there returns.
        bits: 1 to 8.
        weight: How much an error at x counts: the same everywhere in the domain, or as a normal density.
        scale: Standard deviation of the normal density.
        domain: Interval over which the error is taken; by default [-100, 100], or ten standard deviations either side.

    Raises:
        UsageError: The function is unknown, or the domain is empty, too narrow or too wide.
    """
    check_argument(function, (str, Activation), "table", "the name of a function, or what own_activation returns")
    check_argument(bits, int, "table: bits", "a whole number from 1 to 8")
    return _known(function, bits, weight, scale, domain)


@functools.cache
def _known(
    function: str | Activation, bits: int, weight: Weight, scale: float, domain: tuple[float, float] | None
) -> Table:
    target = activation(function) if isinstance(function, str) else function
    path = _path(target, bits, weight, scale, domain) if target.lasting else None
    kept = None if path is None else _read(path)
    if kept is not None:
        return kept
    found = solve(target, bits, weight, scale, domain)
    if path is not None:
        with contextlib.suppress(OSError):  # a full disk: the table is computed again next time
            write_whole(path, found.model_dump_json().encode())
    return found


def solve(
    function: str | Activation,
    bits: int,
    weight: Weight = "uniform",
    scale: float = 1.0,
    domain: tuple[float, float] | None = None,
) -> Table:
    """Compute the best table; the arguments are those of :func:`table`."""
    target = activation(function) if isinstance(function, str) else function
    end = _UNIFORM_END if weight == "uniform" else _NORMAL_END * scale
    low, high = domain or (-end, end)
    if not low < high or not math.isfinite(high - low):
        raise UsageError(f"the domain {low:g} to {high:g} is not an interval: write its lower end first")
    if not _NARROWEST <= high - low <= _WIDEST or high - low < _SHARE * max(abs(low), abs(high)):
        raise UsageError(f"the domain {low:g} to {high:g} is too wide or too narrow to compute with in 64 bits")
    fold = target.even and low == -high
    density = functools.partial(_density, scale=None if weight == "uniform" else scale)
    kinks = np.array(target.kinks, dtype=np.float64)
    best = optimallevels.best_segments(target.derivative, density, (0.0 if fold else low, high), 2**bits, kinks)
    return Table(
        function=target.key,
        bits=bits,
        fold=fold,
        # + 0.0 makes zero of a negative zero
        borders=tuple((np.round(best.borders, _DIGITS) + 0.0).tolist()),
        levels=tuple(best.levels.tolist()),
        error=best.error * (2 if fold else 1),
    )


def relative_gradient_error(function: str | Activation, found: Table, scale: float = 1.0) -> float:
    """Return ``sqrt(E[(d - q)**2] / E[d**2])`` of a table q of the derivative d, for x normal with this scale.

    This is the relative error that a layer adds to a gradient that is independent of the layer's input.
    """
    target = activation(function) if isinstance(function, str) else function
    end = _NORMAL_END * scale
    borders = np.array([-border for border in found.borders] * found.fold + list(found.borders))
    # pieces end where the table jumps and the derivative bends, so that each is smooth
    x = np.unique(np.concatenate([np.linspace(-end, end, _PIECES), borders, target.kinks]))
    nodes, weights = np.polynomial.legendre.leggauss(10)
    half = np.diff(x)[:, None] / 2
    points = x[:-1, None] + half * (1 + nodes)
    mass = _density(points, scale) * half * weights
    codes = np.searchsorted(found.borders, np.abs(points) if found.fold else points)
    exact = target.derivative(points)
    return math.sqrt((mass * (exact - np.array(found.levels)[codes]) ** 2).sum() / (mass * exact**2).sum())


def _path(
    target: Activation, bits: int, weight: Weight, scale: float, domain: tuple[float, float] | None
) -> Path | None:
    sources = (__file__, sys.modules[Activation.__module__].__file__, optimallevels.__file__)
    folder = rawkernel.folder("tables", [Path(source) for source in sources if source is not None])
    shape = weight if weight == "uniform" else f"{weight}-{scale!r}"
    if target.key != target.name or domain is not None:
        shape += "-" + hashlib.sha256(f"{target.key} {domain}".encode()).hexdigest()[:12]
    return None if folder is None else folder / f"{target.name}-{bits}-{shape}.json"


def _density(x: Array, scale: float | None) -> Array:
    if scale is None:
        return np.ones_like(x)
    return np.asarray(np.exp(-0.5 * (x / scale) ** 2) / (scale * math.sqrt(2 * math.pi)))


def _read(path: Path) -> Table | None:
    try:
        return Table.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):  # missing or broken: the table is computed and written again
        return None
