"""Charts of training runs: curves over the steps, as PNG or SVG."""

from __future__ import annotations

import importlib
import io
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actbench.errors import UsageError
from actbench.paths import away_from_here
from actbench.report.plain import plain
from actbench.tools.train.records import Trained, TrainingRun
from actbench.tools.train.tables import mean_and_deviation


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
            "curves are drawn by matplotlib, which is not installed: 'pip install matplotlib'; an HTML page "
            "(--export-html) has them without it"
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
