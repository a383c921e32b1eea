"""Learning curves of training runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from actbench.errors import UsageError
from actbench.report.plain import plain
from actbench.tools.html.charts import Chart, Picture, linear
from actbench.tools.html.html import Beside, Details, Group, beside, texts_of
from actbench.tools.html.pictures import CYCLE
from actbench.tools.train.records import Trained, TrainingRun
from actbench.tools.train.tables import Row, mean_and_deviation, rows_of

_FEW = 4
"""The bands of deviation of more schemes could not be told apart."""
_POINTS = 60
"""Most points of a curve of training losses; each is a mean over steps."""

Series = Sequence[tuple[int, float]]


def beside_trained(runs: Sequence[TrainingRun]) -> Beside:
    """Return charts and details of the rows of :func:`actbench.tools.train.tables.accuracy_table`."""
    return beside(groups_of(runs), rows_of(runs), _details)


def _details(row: Row) -> Details:
    commands, seeds = {run.command for run in row.runs}, ", ".join(str(run.case.seed) for run in row.runs)
    return Details({**texts_of(row.runs[0]), "Command": plain("\n".join(sorted(commands))), "Seeds": seeds})


def pictures_of(runs: Sequence[TrainingRun]) -> tuple[Picture, ...]:
    """Return the curves of all models and data sets; a UsageError if no run was trained to its end."""
    found = tuple(
        picture._replace(title=f"{group.name}: {picture.title.lower()}")
        for group in groups_of(runs)
        for picture in group.pictures
    )
    if not found:
        raise UsageError("there are no curves to draw: no run was trained to its end")
    return found


def groups_of(runs: Sequence[TrainingRun]) -> list[Group]:
    """Return the training loss and the validation metric of each model and data set."""
    found: dict[str, list[tuple[str, Trained]]] = {}
    for run in runs:
        if isinstance(run.outcome, Trained):
            name = f"{run.case.model} on {run.case.data}"
            found.setdefault(name, []).append((run.label or run.case.scheme, run.outcome))
    groups = []
    for name, rows in found.items():
        metric = rows[0][1].metric
        losses = _picture("Training loss", "training loss", [(scheme, _losses(of)) for scheme, of in rows])
        scores = [
            (scheme, [(each.step, float(getattr(each, of.metric))) for each in of.evaluations]) for scheme, of in rows
        ]
        pictures = losses, _picture(f"{metric.capitalize()} on the validation set", metric, scores)
        groups.append(Group(plain(name), pictures))
    return groups


def _losses(outcome: Trained) -> Series:
    size = math.ceil(len(outcome.losses) / _POINTS)
    parts = [(start, outcome.losses[start : start + size]) for start in range(0, len(outcome.losses), size)]
    return [(start + len(part), statistics.fmean(part)) for start, part in parts]


def curves(rows: Sequence[tuple[str, Series]]) -> dict[str, list[tuple[int, float, float]]]:
    """Return the points of each scheme: step, mean over the seeds, as far as the shortest, and deviation."""
    seeds: dict[str, list[Series]] = {}
    for scheme, series in rows:
        seeds.setdefault(plain(scheme), []).append(series)
    found: dict[str, list[tuple[int, float, float]]] = {}
    for scheme, members in seeds.items():
        for place in zip(*members, strict=False):
            over = mean_and_deviation([y for _, y in place])
            if over is not None and math.isfinite(over.value + (over.spread or 0.0)):
                found.setdefault(scheme, []).append((place[0][0], over.value, over.spread or 0.0))
    return found


def _picture(title: str, y_title: str, rows: Sequence[tuple[str, Series]]) -> Picture:
    drawn = curves(rows)
    points = [point for each in drawn.values() for point in each] or [(0, 0.0, 0.0)]
    has_bands = len(drawn) <= _FEW
    ends = [value + sign * spread * has_bands for _, value, spread in points for sign in (-1, 1)]
    colours = dict(zip(drawn, itertools.cycle(CYCLE), strict=False))
    chart = Chart(linear("steps", [step for step, _, _ in points]), linear(y_title, ends), legend=colours)
    for scheme, each in drawn.items():
        colour = colours[scheme]
        if has_bands:
            low = [(step, value - spread) for step, value, spread in reversed(each)]
            high = [(step, value + spread) for step, value, spread in each]
            chart.line(high, back=low, fill=colour, stroke="none", fill_opacity=0.13)
        chart.line([point[:2] for point in each], stroke=colour, stroke_width=1.8)
        for step, value, spread in each:
            text = f"{value:.4g}" + (f" ± {spread:.2g}" if spread else "")
            chart.dot(step, value, f"{scheme}\nstep {step}\n{y_title} {text}", "small", fill=colour, stroke="none")
    several = any(spread for _, _, spread in points)
    about = "Mean over the seeds; the pointer shows their standard deviation." if several else "One seed."
    return Picture(title, about, chart)
