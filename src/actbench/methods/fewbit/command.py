"""The verb tables: the few-bit table of an activation function's derivative."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

from actbench.cli.app import argument, command, option
from actbench.cli.printing import JsonOption
from actbench.errors import UsageError

if TYPE_CHECKING:
    from actbench.methods.fewbit import tables as fewbit
    from actbench.methods.fewbit.activation import Activation

_COLUMNS, _ROWS = 72, 16
_BLANK, _EXACT, _STEP, _BOTH = " ", "·", "█", "▓"


@command(rank=120)
def tables(
    function: Annotated[str, argument("FUNCTION", "gelu, silu, tanh …, or file.py:function for one of your own.")],
    bits: Annotated[int, option("--bits", "Bits of a code.", min=1, max=8)] = 3,
    weight: Annotated[
        Literal["uniform", "normal"], option("--weight", "Weight of an error at x: uniform, or a normal density.")
    ] = "uniform",
    scale: Annotated[float, option("--scale", "Standard deviation of --weight normal.", min=1e-30, max=1e30)] = 1.0,
    domain: Annotated[
        tuple[float, float] | None,
        option("--domain", "Range of x for the error (default -100 100, or ten standard deviations)."),
    ] = None,
    alpha: Annotated[float | None, option("--alpha", "alpha of elu and celu.")] = None,
    beta: Annotated[float | None, option("--beta", "beta of softplus.")] = None,
    threshold: Annotated[float | None, option("--threshold", "threshold of softplus.")] = None,
    export_json: JsonOption = None,
) -> None:
    """Show the few-bit table of an activation function's derivative: borders, levels, errors and a plot.

    Examples:

    actbench tables gelu --bits 3

    actbench tables silu --bits 4 --weight normal --scale 2

    actbench tables gelu --bits 3 --domain -10 10

    actbench tables elu --alpha 0.5 --bits 2 --export-json elu.json
    """
    from actbench.methods.fewbit.tables import relative_gradient_error, table
    from actbench.report.render import exports

    if weight == "uniform" and scale != 1.0:
        raise UsageError("--scale needs a normal density: add --weight normal")
    given = {"alpha": alpha, "beta": beta, "threshold": threshold}
    target = _target(function, {name: value for name, value in given.items() if value is not None})
    found = table(target, bits, weight, scale, domain)
    relative = relative_gradient_error(target, found)
    _print(target, found, relative)
    if export_json is not None:
        text = json.dumps({**found.model_dump(), "relative_gradient_error": relative}, indent=2)
        exports.export({export_json: text + "\n"})


def _target(function: str, parameters: dict[str, float]) -> Activation:
    from actbench.methods.fewbit.activation import ACTIVATIONS, activation
    from actbench.methods.fewbit.piecewise import PIECEWISE
    from actbench.methods.fewbit.useractivation import OwnFunction, check

    if ".py:" in function:
        try:
            check(function)
        except ValueError as error:
            raise UsageError(f"{function}: {error}") from None
        return OwnFunction.load(function).activation()
    if function in PIECEWISE:
        raise UsageError(f"{function} needs no table: its derivative has two values, and one bit keeps it exactly")
    if function not in ACTIVATIONS:
        import difflib

        close = difflib.get_close_matches(function, ACTIVATIONS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"there is no function {function!r}; {hint}known: {', '.join(ACTIVATIONS)}, file.py:function")
    return activation(function, **parameters)


def _print(target: Activation, found: fewbit.Table, relative: float) -> None:
    of = "|x|" if found.fold else "x"
    ends = ["0" if found.fold else "-inf", *(f"{border:.6f}" for border in found.borders), "inf"]
    print(f"{target.label}: {found.bits} bits, {len(found.levels)} levels" + (", of |x|" if found.fold else ""))
    for code, level in enumerate(found.levels):
        print(f"  {code:3d}  {ends[code]:>12} < {of} <= {ends[code + 1]:>12}   {level:10.6f}")
    print(f"error E: {found.error:.6g} (the weighted integral of the squared error of the derivative)")
    print(f"relative gradient error for x ~ N(0, 1): {relative:.4f}\n")
    print("\n".join(plot(target, found)))


def plot(target: Activation, found: fewbit.Table) -> list[str]:
    """Draw a derivative (dots) and its table (blocks) as lines of text."""
    import numpy as np

    reach = 1.3 * max(1.0, *(abs(border) for border in found.borders))
    x = np.linspace(-reach, reach, _COLUMNS)
    exact = target.derivative(x)
    codes = np.searchsorted(np.array(found.borders), np.abs(x) if found.fold else x)
    steps = np.array(found.levels)[codes]
    low, high = min(exact.min(), steps.min()), max(exact.max(), steps.max())
    height = max(high - low, 1e-12)
    cells = [[_BLANK] * _COLUMNS for _ in range(_ROWS)]
    for column in range(_COLUMNS):
        for value, mark in ((steps[column], _STEP), (exact[column], _EXACT)):
            row = round(float((high - value) / height) * (_ROWS - 1))
            cells[row][column] = _BOTH if mark == _EXACT and cells[row][column] == _STEP else mark
    labels = {0: f"{high:.3g}", _ROWS - 1: f"{low:.3g}"}
    lines = [f"{labels.get(row, ''):>8} │{''.join(line).rstrip()}" for row, line in enumerate(cells)]
    left, right = f"{-reach:.3g}", f"{reach:.3g}"
    axis = f"{left}{right:>{_COLUMNS - len(left)}}"
    return [*lines, f"{'':>8} └{'─' * _COLUMNS}", f"{'':>10}{axis}", f"{'':>10}{_EXACT} derivative  {_STEP} table"]
