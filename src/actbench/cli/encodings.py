"""Number formats and few-bit tables: the verbs encodings and tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

from actbench.cli.app import argument, command, count_option, option
from actbench.cli.flags import expanded
from actbench.cli.printing import ExportFlags, JsonOption, export, remark, show
from actbench.errors import UsageError
from actbench.results.tables import Table, fill
from actbench.results.tables.values import Column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actbench.codecs import tables as fewbit
    from actbench.codecs.activation import Activation
    from actbench.codecs.encodings import Distribution, Quality

    Row = dict[str, Quality]

_SIMULATED = "Simulated: numbers stay as large as they were, and bits are as the authors count them, without metadata."

EncodingOption = Annotated[
    list[str] | None,
    option(
        "--encoding",
        "NAME[:VALUE][,key=value…], such as int:6, fp8:e5m2 or smaq_simulated,clamp=true; repeat for several rows. "
        "Default: one of each.",
        metavar="SPEC",
    ),
]
DistributionOption = Annotated[
    list[str] | None,
    option("--distribution", "normal, tiny, laplace …; repeat or separate by commas. Default: all.", metavar="NAME"),
]


@command()
@expanded
def encodings(
    *,
    encoding: EncodingOption = None,
    distribution: DistributionOption = None,
    elements: Annotated[int, option("--elements", "Numbers of each distribution.", min=64, max=2**30)] = 2**20,
    seed: Annotated[int, count_option("--seed", "Seed of the numbers and of stochastic rounding.", least=0)] = 0,
    exports: ExportFlags,
) -> None:
    """Compare number formats: really stored bits per element, and signal to noise for several distributions.

    --export-json has the bits for each distribution; the table shows those of the first.

    Examples:

    actbench encodings

    actbench encodings --encoding int:6 --encoding smaq_simulated --distribution normal,relu
    """
    from actbench.codecs.encodings import COMPARED, build, snr_table

    chosen = _distributions(distribution)
    found = snr_table(
        [build(text) for text in encoding or COMPARED],
        chosen,
        seed,
        elements,
        begins=lambda name: remark(f"starts: {elements:,} numbers, {name}"),
    )
    table = _table(found, list(chosen), seed)
    text = json.dumps([row.model_dump(mode="json") for row in found], indent=2) + "\n"
    export(exports, [table], lambda: text)
    show(table, beside=exports)


def _distributions(given: Sequence[str] | None) -> dict[str, Distribution]:
    from actbench.codecs.encodings import DISTRIBUTIONS

    names = [name.strip() for text in given or () for name in text.split(",")] or list(DISTRIBUTIONS)
    for name in names:
        if name not in DISTRIBUTIONS:
            raise UsageError(f"--distribution {name!r} is not one of {', '.join(DISTRIBUTIONS)}")
    return {name: DISTRIBUTIONS[name] for name in names}


def _table(found: Sequence[Quality], names: Sequence[str], seed: int) -> Table:
    """Return one row for each encoding, one column for each distribution."""
    rows: list[Row] = [
        {quality.distribution: quality for quality in found[first : first + len(names)]}
        for first in range(0, len(found), len(names))
    ]
    first = names[0]
    columns: list[Column[Row]] = [
        Column("encoding", "Encoding", "text", lambda row: row[first].encoding),
        Column("simulated", "Simulated", "flag", lambda row: not row[first].stored or None),
        Column("bits", "Bits stored", "number", lambda row: row[first].bits, "lower"),
        Column("counted_bits", "Bits counted", "number", lambda row: row[first].counted_bits, "lower"),
        *(_column(name) for name in names),
    ]
    numbers = f"{found[0].elements} float32 numbers of each distribution, seed {seed}"
    notes = [f"Signal to noise in decibels, of {numbers}; bits per element on {first!r}, with all metadata."]
    if not all(quality.stored for quality in found):
        notes.append(_SIMULATED)
    return fill("Encodings", columns, rows, notes)


def _column(name: str) -> Column[Row]:
    return Column(f"{name}_db", name, "number", lambda row: row[name].snr_db, "higher")


_COLUMNS, _ROWS = 72, 16
_BLANK, _EXACT, _STEP, _BOTH = " ", "·", "█", "▓"


@command()
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
    from actbench.codecs.tables import relative_gradient_error, table
    from actbench.results.render import exports

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
    from actbench.codecs.activation import ACTIVATIONS, activation
    from actbench.nn.piecewise import PIECEWISE
    from actbench.nn.useractivation import OwnFunction, check

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
