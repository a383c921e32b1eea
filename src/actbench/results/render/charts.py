"""Charts of training runs: curves over the steps, in Braille characters on a terminal, or as PNG or SVG."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from actbench.errors import UsageError
from actbench.paths import away_from_here
from actbench.results.plain import plain
from actbench.results.runs import Trained, TrainingRun
from actbench.results.tables.training import mean_and_deviation


@dataclass(frozen=True)
class Curve:
    """One line of a chart, ``points`` from left to right; a y that is not finite is a gap.

    ``spread`` is half the height of a band around the line, one number for each point; empty for no band.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    spread: tuple[float, ...] = ()

    def lone(self) -> tuple[tuple[float, float], ...]:
        """Return the points without a neighbour to draw a line to; they become dots."""
        seen = [False, *(math.isfinite(y) for _, y in self.points), False]
        found = zip(self.points, seen[:-2], seen[1:-1], seen[2:], strict=True)
        return tuple(point for point, before, here, after in found if here and not (before or after))


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes, in the order of the legend."""

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]


POINTS = 60  # most points of a curve of training losses; each is a mean over steps

Series = tuple[tuple[float, float], ...]


def curves_of(runs: Sequence[TrainingRun]) -> tuple[Chart, ...]:
    """Return the training loss and the validation metric for each model and data set."""
    groups: dict[tuple[str, str], list[TrainingRun]] = {}
    for run in runs:
        if isinstance(run.outcome, Trained):
            groups.setdefault((run.case.model, run.case.data), []).append(run)
    found: list[Chart] = []
    for (model, data), members in groups.items():
        metric = _outcomes(members)[0].metric
        found.append(_chart(f"{model} on {data}: training loss", "training loss", members, _losses))
        found.append(_chart(f"{model} on {data}: {metric} on the validation set", metric, members, _evaluations))
    return tuple(found)


def _chart(title: str, y: str, runs: Sequence[TrainingRun], series: Callable[[Trained], Series]) -> Chart:
    schemes: dict[str, list[TrainingRun]] = {}
    for run in runs:
        schemes.setdefault(run.label or run.case.scheme, []).append(run)
    curves = tuple(_mean(label, [series(outcome) for outcome in _outcomes(rows)]) for label, rows in schemes.items())
    return Chart(title, "steps", y, curves)


def _mean(label: str, seeds: Sequence[Series]) -> Curve:
    """Return the mean of several seeds, as far as the shortest, with their sample standard deviation."""
    points, spreads = [], []
    for place in zip(*seeds, strict=False):
        found = mean_and_deviation([y for _, y in place])
        assert found is not None
        points.append((place[0][0], found.value))
        spreads.append(found.spread or 0.0)
    return Curve(label, tuple(points), tuple(spreads) if len(seeds) > 1 else ())


def _losses(outcome: Trained) -> Series:
    size = math.ceil(len(outcome.losses) / POINTS)
    starts = range(0, len(outcome.losses), size)
    parts = [outcome.losses[start : start + size] for start in starts]
    return tuple((start + len(part), statistics.fmean(part)) for start, part in zip(starts, parts, strict=True))


def _evaluations(outcome: Trained) -> Series:
    return tuple((found.step, float(getattr(found, outcome.metric))) for found in outcome.evaluations)


def _outcomes(runs: Sequence[TrainingRun]) -> list[Trained]:
    return [outcome for run in runs if isinstance(outcome := run.outcome, Trained)]


COLOURS = ("bright_blue", "bright_red", "bright_green", "bright_yellow", "bright_magenta", "bright_cyan", "white")
_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a character, top left first
_AXIS_WIDTH = 9


def drawn(chart: Chart, width: int = 80, height: int = 14) -> RenderableType:
    """Draw a chart in Braille characters, without points that are not finite."""
    finite = [(x, y) for curve in chart.curves for x, y in curve.points if math.isfinite(y)]
    if not finite:
        return Text(f"{plain(chart.title)}: no finite value")
    canvas = _Canvas(max(8, width - _AXIS_WIDTH - 1), height, finite)
    for number, curve in enumerate(chart.curves):
        canvas.add(curve, number)
    labels = [plain(curve.label) for curve in chart.curves]
    legend = Text("  ".join("━━ " + label for label in labels))
    start = 0
    for number, label in enumerate(labels):
        legend.stylize(COLOURS[number % len(COLOURS)], start, start + 2)
        start += len(label) + 5
    reach = f"{canvas.left:g}" + (f" … {canvas.right:g}" if canvas.right > canvas.left else "")
    ends = Text(f"{'':{_AXIS_WIDTH}} {reach} {plain(chart.x)}", style="dim")
    return Group(Text(plain(chart.title), style="bold"), *canvas.lines(), ends, legend)


class _Canvas:
    """Dots, and for each character the curve that set its last dot."""

    def __init__(self, columns: int, rows: int, points: Sequence[tuple[float, float]]) -> None:
        self.columns, self.rows = columns, rows
        self.left, self.right = min(x for x, _ in points), max(x for x, _ in points)
        self.bottom, self.top = min(y for _, y in points), max(y for _, y in points)
        self._letters = [[_BLANK] * columns for _ in range(rows)]
        self._owners: list[list[int | None]] = [[None] * columns for _ in range(rows)]

    def add(self, curve: Curve, number: int) -> None:
        for (x, y), (next_x, next_y) in zip(curve.points, curve.points[1:] + curve.points[-1:], strict=True):
            if not math.isfinite(y):
                continue
            column, row = self._place(x, y)
            end = self._place(next_x, next_y) if math.isfinite(next_y) else (column, row)
            for dot in _line((column, row), end):
                self._set(*dot, number)
        for point in curve.lone():
            column, row = self._place(*point)
            for across, down in itertools.product((0, 1), repeat=2):
                self._set(column // 2 * 2 + across, row // 2 * 2 + down, number)

    def lines(self) -> Iterator[Text]:
        """Yield the lines from the top, with three numbers on the vertical axis, or one if all are equal."""
        middle = self.rows // 2
        marks = (0, middle, self.rows - 1) if self.top > self.bottom else (middle,)
        for row, (letters, owners) in enumerate(zip(self._letters, self._owners, strict=True)):
            share = 1 - row / max(1, self.rows - 1)
            label = f"{self.bottom + share * (self.top - self.bottom):.4g}" if row in marks else ""
            line = Text(f"{label:>{_AXIS_WIDTH - 1}} │", style="dim")
            for letter, owner in zip(letters, owners, strict=True):
                line.append(chr(letter), style="" if owner is None else f"not dim {COLOURS[owner % len(COLOURS)]}")
            yield line

    def _place(self, x: float, y: float) -> tuple[int, int]:
        column = _share(x, self.left, self.right) * (2 * self.columns - 1)
        row = _share(y, self.top, self.bottom) * (4 * self.rows - 1)
        return round(column), round(row)

    def _set(self, column: int, row: int, number: int) -> None:
        self._letters[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        self._owners[row // 4][column // 2] = number


def _share(value: float, first: float, last: float) -> float:
    """Return the position of a value between the first and the last, from 0 to 1."""
    return 0.5 if first == last else (value - first) / (last - first)


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the dots of a line between two dots, with both ends."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    for step in range(length + 1):
        share = step / length if length else 0.0
        yield round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1]))


FORMATS = ("png", "svg")
_SIZE_INCHES = (7.0, 4.2)


def picture(charts: Sequence[Chart], kind: str) -> bytes:
    """Draw charts below each other as ``png`` or ``svg``; an SVG has no date and no random names.

    Raises:
        UsageError: matplotlib is not installed, the kind is another, or there is nothing to draw.
    """
    check([kind])
    if not charts:
        raise UsageError("there are no curves to draw: no run was trained to its end")
    matplotlib, figures = require()
    with matplotlib.rc_context({"svg.hashsalt": "actbench"}):
        width, height = _SIZE_INCHES
        figure = figures.Figure(figsize=(width, height * len(charts)), layout="constrained")
        for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
            _draw(axes, chart)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return out.getvalue()


def check(kinds: Sequence[str]) -> None:
    """Raise a UsageError if matplotlib is not installed, or a kind is neither ``png`` nor ``svg``."""
    for kind in kinds:
        if kind not in FORMATS:
            found = f"as {kind!r}" if kind else "in a file without a suffix"
            raise UsageError(f"--export-curves: curves can be drawn as {' or '.join(FORMATS)}, not {found}")
    require()


def require() -> tuple[Any, Any]:
    """Return matplotlib and its figures, which need no display; a UsageError if it is not installed."""
    try:
        with away_from_here():  # it reads a matplotlibrc of the current folder, before that of MATPLOTLIBRC
            return importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError(
            "curves as PNG or SVG are drawn by matplotlib, which is not installed: 'pip install matplotlib'; on a "
            "terminal they are drawn without it"
        ) from None


def _draw(axes: Any, chart: Chart) -> None:
    for curve in chart.curves:
        _add(axes, curve)
    axes.set_title(plain(chart.title), fontsize=10, parse_math=False)
    axes.set_xlabel(plain(chart.x), parse_math=False)
    axes.set_ylabel(plain(chart.y), parse_math=False)
    axes.grid(alpha=0.3)
    for text in axes.legend(fontsize=8).get_texts():
        text.set_parse_math(False)


def _add(axes: Any, curve: Curve) -> None:
    x = [point for point, _ in curve.points]
    y = [value if math.isfinite(value) else math.nan for _, value in curve.points]
    (line,) = axes.plot(x, y, label=plain(curve.label), linewidth=1.4)
    lone = curve.lone()  # no line goes to these
    axes.plot([x for x, _ in lone], [y for _, y in lone], "o", color=line.get_color(), markersize=4)
    if curve.spread:
        low = [value - spread for value, spread in zip(y, curve.spread, strict=True)]
        high = [value + spread for value, spread in zip(y, curve.spread, strict=True)]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
