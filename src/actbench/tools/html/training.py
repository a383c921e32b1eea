"""Learning curves of training runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from actbench.errors import UsageError
from actbench.report.plain import plain
from actbench.tools.html.pictures import Beside, Details, Group, Picture, axis, beside, spec, texts_of, tooltip
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
    texts = {**texts_of(row.runs[0]), "Command": plain("\n".join(sorted(commands))), "Seeds": seeds}
    return Details(texts)


def pictures_of(runs: Sequence[TrainingRun]) -> tuple[Picture, ...]:
    """Return the curves of all models and data sets; a UsageError if no run was trained to its end."""
    found = tuple(
        Picture(f"{group.name}: {picture.title.lower()}", picture.about, picture.spec)
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
        pictures = (
            _picture("Training loss", "training loss", rows, _losses),
            _picture(f"{metric.capitalize()} on the validation set", metric, rows, _evaluations),
        )
        groups.append(Group(plain(name), pictures))
    return groups


def _losses(outcome: Trained) -> Series:
    size = math.ceil(len(outcome.losses) / _POINTS)
    parts = [(start, outcome.losses[start : start + size]) for start in range(0, len(outcome.losses), size)]
    return [(start + len(part), statistics.fmean(part)) for start, part in parts]


def _evaluations(outcome: Trained) -> Series:
    return [(found.step, float(getattr(found, outcome.metric))) for found in outcome.evaluations]


def values_of(rows: Sequence[tuple[str, Trained]], series: Callable[[Trained], Series]) -> list[dict[str, Any]]:
    """Return the points of schemes: the mean over the seeds, as far as the shortest, and its deviation."""
    seeds: dict[str, list[Series]] = {}
    for scheme, outcome in rows:
        seeds.setdefault(scheme, []).append(series(outcome))
    values = []
    for scheme, members in seeds.items():
        for place in zip(*members, strict=False):
            found = mean_and_deviation([y for _, y in place])
            if found is not None and math.isfinite(found.value):
                spread = found.spread or 0.0
                text = f"{found.value:.4g}" + (f" ± {spread:.2g}" if spread else "")
                band = {"low": found.value - spread, "high": found.value + spread}
                values.append(
                    {"scheme": plain(scheme), "step": place[0][0], "value": found.value, **band, "text": text}
                )
    return values


def _picture(
    title: str, y_title: str, rows: Sequence[tuple[str, Trained]], series: Callable[[Trained], Series]
) -> Picture:
    values = values_of(rows, series)
    names = list(dict.fromkeys(value["scheme"] for value in values))
    color = {
        "field": "scheme",
        "type": "nominal",
        "sort": names,
        "scale": {"domain": names},
        "legend": {
            "orient": "bottom",
            "title": None,
            "labelLimit": 220,
            "columns": 2,
            "symbolType": "stroke",
            "symbolOpacity": 1,
            "symbolStrokeWidth": 2.5,
        },
    }
    x, y = axis("step", "steps"), axis("value", y_title)
    band = {
        "mark": {"type": "area", "opacity": 0.13},
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color},
    }
    line = {"mark": {"type": "line", "strokeWidth": 1.8}, "encoding": {"x": x, "y": y, "color": color}}
    points = {
        "mark": {"type": "point", "size": 25, "filled": True},
        "encoding": {
            "x": x,
            "y": y,
            "color": color,
            "tooltip": tooltip(scheme="scheme", step="step", text=y_title),
        },
    }
    several = any(value["low"] < value["high"] for value in values)
    about = "Mean over the seeds; the pointer shows their standard deviation." if several else "One seed."
    layers = [band, line, points] if len(names) <= _FEW else [line, points]
    return Picture(title, about, spec(values, layers))
