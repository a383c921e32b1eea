"""Charts of points: memory against time, of rows and of tables with curves, and the gradient's error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from actbench.report.plain import plain
from actbench.report.tables import Curve, Table
from actbench.report.tables.values import write
from actbench.tools.html.pictures import (
    HEIGHT,
    Beside,
    Group,
    Picture,
    Scale,
    Values,
    about_limit,
    axis,
    byte_scale,
    colour,
    colours_of,
    limit_line,
    second_scale,
    spec,
    ticks_of,
    tooltip,
)

_POINT = {"type": "point", "size": 90, "strokeWidth": 2}
_SHAPES = {"measured": "circle", "estimated": "diamond"}
_RIGHT = 0.6  # share of the width
_FEW = 12  # the names of more points would overlap


def memory_against_time(rows: Values, memory: Scale, limit: int | None) -> Picture:
    """Return the frontier chart; a row that another beats in both memory and time is faded."""
    time = second_scale(max(row["seconds"] for row in rows))
    values = [
        {**row, "drawn_time": row["seconds"] / time.factor, "drawn": row["peak_bytes"] / memory.factor} for row in rows
    ]
    _place_names(values, [row["drawn_time"] for row in values])
    x = axis("drawn_time", f"time of a step ({time.unit})")
    y = axis("drawn", f"peak ({memory.unit})")
    best = {"filter": {"field": "frontier", "equal": True}}
    named = {"filter": {"or": [{"field": "frontier", "equal": True}, {"field": "scheme", "equal": "exact"}]}}
    few = len(rows) <= _FEW
    sources = [source for source in _SHAPES if any(row["source"] == source for row in rows)]
    line = {
        "transform": [best],
        "mark": {"type": "line", "interpolate": "step-after", "color": colour("dim"), "strokeDash": [4, 3]},
        "encoding": {"x": x, "y": y, "detail": {"field": "meter", "type": "nominal"}},
    }
    points = {
        "mark": {**_POINT, "stroke": colour("accent"), "fill": colour("accent")},
        "encoding": {
            "x": x,
            "y": y,
            "shape": {
                "field": "source",
                "type": "nominal",
                "scale": {"domain": sources, "range": [_SHAPES[source] for source in sources]},
                "legend": {"title": None, "orient": "top"} if len(sources) > 1 else None,
            },
            "fillOpacity": {"condition": {"test": "datum.source === 'estimated'", "value": 0}, "value": 1},
            "opacity": {"condition": {"test": "datum.frontier", "value": 1}, "value": 0.3},
            "tooltip": tooltip(scheme="scheme", peak_text="peak", seconds_text="step", meter="meter"),
        },
    }
    most = max(row["peak_bytes"] for row in rows)
    rules = limit_line("y", limit, most, memory) if any(not row["fits"] for row in rows) else []
    about = "Lower left is better. Faded: another row needs less memory and less time." + (
        " Hollow: the time is estimated." if "estimated" in sources else ""
    )
    return Picture(
        "Memory against time", about, spec(values, [*rules, line, points, _names(None if few else named, x, y)])
    )


def curves_of_tables(tables: Sequence[Table]) -> Beside:
    """Return a chart for all tables with a curve that are drawn together: their rows, joined, and the limit."""
    charts: dict[str, list[tuple[Curve, Table]]] = {}
    for table in tables:
        if table.curve is not None:
            charts.setdefault(table.curve.chart, []).append((table.curve, table))
    return Beside(tuple(Group(plain(name), (_curves(drawn),)) for name, drawn in charts.items()))


_COLOURS = ("#5b7fa6", "#cf6a63", "#67a58a", "#8f78ad")


def _curves(drawn: Sequence[tuple[Curve, Table]]) -> Picture:
    rows: list[dict[str, Any]] = [
        {
            "kind": curve.name,
            "scheme": plain(str(row[curve.label])),
            "bytes": row[curve.bytes],
            "bytes_text": write(row[curve.bytes], "bytes"),
            "seconds": row[curve.seconds],
            "seconds_text": write(row[curve.seconds], "seconds"),
        }
        for curve, table in reversed(drawn)  # what is drawn last is above the others
        for row in table.rows
    ]
    limit = next((curve.limit_bytes for curve, _ in drawn if curve.limit_bytes), None)
    most = max(row["bytes"] for row in rows)
    memory, time = byte_scale(most), second_scale(max(row["seconds"] for row in rows))
    values = [
        {**row, "drawn_time": row["seconds"] / time.factor, "drawn": row["bytes"] / memory.factor} for row in rows
    ]
    x = axis("drawn_time", f"time of a step ({time.unit})")
    y = axis("drawn", f"memory needed ({memory.unit})")
    kinds = dict.fromkeys(curve.name for curve, _ in drawn)
    colours = colours_of(dict(zip(kinds, itertools.cycle(_COLOURS), strict=False)), offset=8)
    line = {"mark": {"type": "line", "interpolate": "step-after"}, "encoding": {"x": x, "y": y, "color": colours}}
    points = {
        "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
        "encoding": {
            "x": x,
            "y": y,
            "color": colours,
            "tooltip": tooltip(scheme="plan", bytes_text="needs", seconds_text="step", kind="with"),
        },
    }
    rules = limit_line("y", limit, most, memory, x=4, align="left")  # on the right is the end of the curve
    fits = "what is below the line fits" if rules else "all of them fit" if limit else "there is no limit"
    about = (
        f"Each point is a plan that no other undercuts in both; {fits}. Times are estimated.{about_limit(limit, most)}"
    )
    return Picture("Memory against time", about, spec(values, [*rules, line, points]), is_wide=True)


def error_beside_memory(rows: Values, memory: Scale) -> Picture:
    """Return a chart of the peak and the distance of the gradient from the exact model's."""
    ticks, least = ticks_of([row["gradient_error"] for row in rows])
    values = [{**row, "drawn": row["peak_bytes"] / memory.factor} for row in rows]
    _place_names(values, [math.log1p(row["gradient_error"] / least) for row in values])
    x = axis(
        "gradient_error",
        "relative error of the gradient",
        scale={"type": "symlog", "constant": least, "nice": False, "domainMin": 0},
        axis={"values": ticks, "labelExpr": "format(datum.value, '.3~g')"},
    )
    y = axis("drawn", f"peak ({memory.unit})")
    points = {
        "mark": {**_POINT, "filled": True, "color": colour("accent"), "opacity": 1},
        "encoding": {
            "x": x,
            "y": y,
            "tooltip": tooltip(scheme="scheme", peak_text="peak", gradient_error_text="gradient error"),
        },
    }
    about = "Relative L2 distance of one gradient from the exact model's. Zero is the exact gradient."
    return Picture(
        "Gradient error and memory",
        about,
        spec(values, [points, *([_names(None, x, y)] if len(rows) <= _FEW else [])]),
    )


_SIDES = {"align": {"expr": "datum.at_right ? 'right' : 'left'"}, "dx": {"expr": "datum.at_right ? -8 : 8"}}


_WHERE_ROOM = {"expr": "width < datum.room ? 0 : 1"}
_NAME_HEIGHT, _LETTER = 18, 6.5  # pixels
_WIDTHS = range(100, 1700, 50)  # of a chart, in pixels


def _place_names(values: list[dict[str, Any]], along: Sequence[float]) -> None:
    """Choose where the names of points stand: near the right end, to the left of a point, where there is room.

    ``room`` is the least width of the chart in which a name overlaps none of the frontier's, nor an earlier one.
    """
    across, up = _shares(along), _shares([row["drawn"] for row in values])
    for row, share in zip(values, across, strict=True):
        row["at_right"], row["room"] = share > _RIGHT, 0
    ranked = sorted(range(len(values)), key=lambda place: not values[place].get("frontier", True))
    for width in _WIDTHS:
        shown: list[tuple[float, float, float]] = []
        for place in ranked:
            length = _LETTER * len(values[place]["scheme"])
            start = across[place] * width + (-8 - length if values[place]["at_right"] else 8)
            box = (start, start + length, up[place] * HEIGHT)
            if any(_overlap(box, other) for other in shown):
                values[place]["room"] = width + _WIDTHS.step
            else:
                shown.append(box)


def _shares(numbers: Sequence[float]) -> list[float]:
    least, most = min(numbers), max(numbers)
    return [(number - least) / ((most - least) or 1) for number in numbers]


def _overlap(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1] and abs(one[2] - other[2]) < _NAME_HEIGHT


def _names(only: dict[str, Any] | None, x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
    """Return the names of schemes beside their points; the pointer shows names that are cut or left out."""
    return {
        "transform": [only] if only else [],
        "mark": {"type": "text", "color": colour("ink"), "fontSize": 11.5, "dy": -8, **_SIDES, "opacity": _WHERE_ROOM},
        "encoding": {"x": x, "y": y, "text": {"field": "scheme", "type": "nominal"}},
    }
