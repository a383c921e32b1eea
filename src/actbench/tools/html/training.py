"""Learning curves of training runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actbench.report.plain import plain
from actbench.tools.html.pictures import Beside, Details, Group, Picture, axis, beside, spec, texts_of, tooltip
from actbench.tools.train.charts import Chart, curves_of
from actbench.tools.train.records import TrainingRun
from actbench.tools.train.tables import Row, rows_of

_FEW = 4  # the bands of deviation of more schemes could not be told apart


def beside_trained(runs: Sequence[TrainingRun]) -> Beside:
    """Return charts and details of the rows of :func:`actbench.tools.train.tables.accuracy_table`."""
    return beside(groups_of(runs), rows_of(runs), _details)


def _details(row: Row) -> Details:
    commands, seeds = {run.command for run in row.runs}, ", ".join(str(run.case.seed) for run in row.runs)
    texts = {**texts_of(row.runs[0]), "Command": plain("\n".join(sorted(commands))), "Seeds": seeds}
    return Details(texts)


def groups_of(runs: Sequence[TrainingRun]) -> list[Group]:
    """Return the curves of each model and data set."""
    charts: dict[str, list[Picture]] = {}
    for chart in curves_of(runs):
        charts.setdefault(chart.title.rpartition(": ")[0], []).append(_picture(chart))
    return [Group(plain(name), tuple(pictures)) for name, pictures in charts.items()]


def _picture(chart: Chart) -> Picture:
    values = [
        {
            "scheme": plain(curve.label),
            "step": x,
            "value": y,
            "low": y - spread,
            "high": y + spread,
            "text": f"{y:.4g}" + (f" ± {spread:.2g}" if spread else ""),
        }
        for curve in chart.curves
        for (x, y), spread in zip(curve.points, curve.spread or [0.0] * len(curve.points), strict=True)
        if math.isfinite(y) and math.isfinite(spread)
    ]
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
    x, y = axis("step", "steps"), axis("value", plain(chart.y))
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
            "tooltip": tooltip(scheme="scheme", step="step", text=plain(chart.y)),
        },
    }
    several = "Mean over the seeds; the pointer shows their standard deviation."
    about = several if any(curve.spread for curve in chart.curves) else "One seed."
    title = plain(chart.title.rpartition(": ")[2])
    layers = [band, line, points] if len(names) <= _FEW else [line, points]
    return Picture(title[:1].upper() + title[1:], about, spec(values, layers))
