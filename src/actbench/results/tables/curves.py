"""Charts, and those of training runs: over the steps one curve for each scheme, the mean of its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actbench.results.runs import Trained, TrainingRun
from actbench.results.tables.training import mean_and_deviation


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: What it is called in the legend.
        points: ``(x, y)`` from left to right; a y that is no finite number is a gap.
        spread: Half the height of a band around the line, one for each point; empty for none.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    spread: tuple[float, ...] = ()

    def lone(self) -> tuple[tuple[float, float], ...]:
        """Return the points that have no neighbour to draw a line to, and so are drawn as dots."""
        seen = [False, *(math.isfinite(y) for _, y in self.points), False]
        found = zip(self.points, seen[:-2], seen[1:-1], seen[2:], strict=True)
        return tuple(point for point, before, here, after in found if here and not (before or after))


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes.

    Attributes:
        title: What the chart shows.
        x: What the horizontal axis counts.
        y: What the vertical axis is.
        curves: In the order of the legend.
    """

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]


POINTS = 60  # of a curve of training losses: each is the mean over so many steps that no more are needed

Series = tuple[tuple[float, float], ...]


def curves_of(runs: Sequence[TrainingRun]) -> tuple[Chart, ...]:
    """Return for each model and data set the training loss and the metric on the validation set."""
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
    """Return the mean of several seeds, as far as all of them go, with their sample standard deviation."""
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
