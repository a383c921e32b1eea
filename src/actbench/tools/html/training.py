"""Learning curves of training runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from actbench.errors import UsageError
from actbench.report.plain import plain
from actbench.tools.html.charts import Json, Picture, axis, chart, layer, nominal, tooltip
from actbench.tools.html.html import Beside, Details, Group, beside, texts_of
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


def _values(rows: Sequence[tuple[str, Series]]) -> list[Json]:
    """Return the points of schemes: the mean over the seeds, as far as the shortest, and its deviation."""
    seeds: dict[str, list[Series]] = {}
    for scheme, series in rows:
        seeds.setdefault(scheme, []).append(series)
    values = []
    for scheme, members in seeds.items():
        for place in zip(*members, strict=False):
            found = mean_and_deviation([y for _, y in place])
            if found is not None and math.isfinite(found.value):
                mean, spread = found.value, found.spread or 0.0
                text = f"{mean:.4g}" + (f" ± {spread:.2g}" if spread else "")
                point = {"scheme": plain(scheme), "step": place[0][0], "value": mean, "text": text}
                values.append({**point, "low": mean - spread, "high": mean + spread})
    return values


def _picture(title: str, y_title: str, rows: Sequence[tuple[str, Series]]) -> Picture:
    values = _values(rows)
    names = list(dict.fromkeys(value["scheme"] for value in values))
    symbols = {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2.5}
    legend = {"orient": "bottom", "title": None, "labelLimit": 220, "columns": 2, **symbols}
    y, color = axis("value", y_title), nominal("scheme", sort=names, scale={"domain": names}, legend=legend)
    xy = {"x": axis("step", "steps"), "y": y, "color": color}
    layers = [
        layer("area", xy | {"y": {**y, "field": "low"}, "y2": {"field": "high"}}, opacity=0.13),
        layer("line", xy, strokeWidth=1.8),
        layer("point", xy | {"tooltip": tooltip(scheme="scheme", step="step", text=y_title)}, size=25, filled=True),
    ]
    several = any(value["low"] < value["high"] for value in values)
    about = "Mean over the seeds; the pointer shows their standard deviation." if several else "One seed."
    return Picture(title, about, chart(values, *layers[len(names) > _FEW :]))
