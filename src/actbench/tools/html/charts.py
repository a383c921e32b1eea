"""Charts as Vega-Lite: layers of marks over the values of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from actbench.model.timeline import TITLES, Kind, Timeline
from actbench.report.plain import plain
from actbench.report.tables import Curve, Table
from actbench.report.tables.step import display_holder
from actbench.report.tables.values import write
from actbench.units import GIB, KIB, MIB, format_bytes

Json = dict[str, Any]
Values = Sequence[Mapping[str, Any]]
"""The data of a chart: raw values in base units, with the values to draw and the texts to show."""


class Picture(NamedTuple):
    """One chart. ``spec`` is Vega-Lite with its data; names are only in the data, never in an expression."""

    title: str
    about: str
    spec: Mapping[str, Any]
    wide: bool = False


class Scale(NamedTuple):
    """A unit of a chart, and its size in base units."""

    unit: str
    factor: float


_BYTES = (Scale("GiB", GIB), Scale("MiB", MIB), Scale("KiB", KIB), Scale("bytes", 1))
_SECONDS = (Scale("s", 1.0), Scale("ms", 1e-3), Scale("µs", 1e-6))


def scale_of(most: float, units: Sequence[Scale] = _BYTES) -> Scale:
    """Return the unit that suits amounts up to this."""
    return next((scale for scale in units if most >= scale.factor), units[-1])


SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
INK, DIM, ACCENT = {"expr": "ink"}, {"expr": "dim"}, {"expr": "accent"}  # the page's colours, light or dark
_HEIGHT = 300


def chart(values: Values, *layers: Json, height: int = _HEIGHT) -> Json:
    """Return a chart of layers over the same values, as wide as its place on the page."""
    size = {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {"$schema": SCHEMA, **size, "data": {"values": list(values)}, "layer": list(layers)}


def layer(mark: str, encoding: Json, *, data: Values | None = None, where: Json | None = None, **style: Any) -> Json:
    """Return marks of a style over the values of the chart, over those of a filter, or over ``data``."""
    own: Json = {} if data is None else {"data": {"values": list(data)}}
    chosen: Json = {} if where is None else {"transform": [{"filter": where}]}
    return {**own, **chosen, "mark": {"type": mark, **style}, "encoding": encoding}


def axis(field: str, title: str, **details: Any) -> Json:
    """Return an encoding of numbers along an axis that need not begin at zero."""
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False, "nice": True}, **details}


def nominal(field: str, **details: Any) -> Json:
    """Return an encoding of names."""
    return {"field": field, "type": "nominal", **details}


def tooltip(**titles: str) -> list[Json]:
    """Return the fields, with titles, that the pointer shows beside a mark."""
    return [nominal(field, title=title) for field, title in titles.items()]


def _by_kind(colours: Mapping[str, str], offset: int) -> Json:
    """Return the encoding of kinds by their colours, with a legend so many pixels above the chart."""
    names, legend = list(colours), {"orient": "top", "title": None, "offset": offset}
    return nominal("kind", sort=names, scale={"domain": names, "range": list(colours.values())}, legend=legend)


_FAR = 2  # a limit that is so many times as large as all that is drawn would leave no room for it


def _limit(channel: str, limit: int | None, most: float, scale: Scale, **style: Any) -> tuple[list[Json], str]:
    """Return a line at the memory limit with a name in a style, and a sentence in its place where it is far away."""
    if limit is None:
        return [], ""
    if 0 < _FAR * most <= limit:
        return [], f" The limit, {format_bytes(limit)}, is {limit / most:.3g} times the most that is shown."
    place = {channel: {"datum": limit / scale.factor, "type": "quantitative"}}
    style |= {"text": f"limit {format_bytes(limit)}", "baseline": "bottom"}
    rule = layer("rule", place, data=[{}], color=INK, strokeDash=[5, 4])
    return [rule, layer("text", place, data=[{}], color=INK, **style)], ""


def _against_time(rows: Values, memory: Scale, title: str) -> tuple[list[Json], Json]:
    """Return the values to draw, and the encoding of both axes."""
    time = scale_of(max(row["seconds"] for row in rows), _SECONDS)
    values = [
        {**row, "drawn_time": row["seconds"] / time.factor, "drawn": row["peak_bytes"] / memory.factor} for row in rows
    ]
    x, y = axis("drawn_time", f"time of a step ({time.unit})"), axis("drawn", f"{title} ({memory.unit})")
    return values, {"x": x, "y": y}


_SHAPES = {"measured": "circle", "estimated": "diamond"}
_FEW = 12  # the names of more points would overlap


def memory_against_time(rows: Values, memory: Scale, limit: int | None) -> Picture:
    """Return the frontier chart; a row that another beats in both memory and time is faded."""
    values, xy = _against_time(rows, memory, "peak")
    _place_names(values, [row["drawn_time"] for row in values])
    shapes = {source: shape for source, shape in _SHAPES.items() if any(row["source"] == source for row in rows)}
    best = {"field": "frontier", "equal": True}
    named = None if len(rows) <= _FEW else {"or": [best, {"field": "scheme", "equal": "exact"}]}
    shape = nominal("source", scale={"domain": list(shapes), "range": list(shapes.values())})
    shape["legend"] = {"title": None, "orient": "top"} if len(shapes) > 1 else None
    points = xy | {
        "shape": shape,
        "fillOpacity": {"condition": {"test": "datum.source === 'estimated'", "value": 0}, "value": 1},
        "opacity": {"condition": {"test": "datum.frontier", "value": 1}, "value": 0.3},
        "tooltip": tooltip(scheme="scheme", peak_text="peak", seconds_text="step", meter="meter"),
    }
    line = xy | {"detail": nominal("meter")}
    over = None if all(row["fits"] for row in rows) else limit
    rules, _ = _limit("y", over, max(row["peak_bytes"] for row in rows), memory, x="width", dy=-5, align="right")
    spec = chart(
        values,
        *rules,
        layer("line", line, where=best, interpolate="step-after", color=DIM, strokeDash=[4, 3]),
        layer("point", points, size=90, strokeWidth=2, stroke=ACCENT, fill=ACCENT),
        _names(xy, named),
    )
    hollow = " Hollow: the time is estimated." if "estimated" in shapes else ""
    about = f"Lower left is better. Faded: another row needs less memory and less time.{hollow}"
    return Picture("Memory against time", about, spec)


_COLOURS = ("#5b7fa6", "#cf6a63", "#67a58a", "#8f78ad")


def curves_of_tables(tables: Sequence[Table]) -> dict[str, Picture]:
    """Return, by name, one chart of all tables whose curves are drawn together: their rows, and the limit."""
    charts: dict[str, list[tuple[Curve, Table]]] = {}
    for table in tables:
        if table.curve is not None:
            charts.setdefault(table.curve.chart, []).append((table.curve, table))
    return {plain(name): _curves(drawn) for name, drawn in charts.items()}


def _curves(drawn: Sequence[tuple[Curve, Table]]) -> Picture:
    rows: list[Json] = [
        {
            "kind": curve.name,
            "scheme": plain(str(row[curve.label])),
            "peak_bytes": row[curve.bytes],
            "peak_text": write(row[curve.bytes], "bytes"),
            "seconds": row[curve.seconds],
            "seconds_text": write(row[curve.seconds], "seconds"),
        }
        for curve, table in reversed(drawn)  # what is drawn last is above the others
        for row in table.rows
    ]
    limit = next((curve.limit_bytes for curve, _ in drawn if curve.limit_bytes), None)
    most, kinds = max(row["peak_bytes"] for row in rows), dict.fromkeys(curve.name for curve, _ in drawn)
    memory = scale_of(most)
    values, xy = _against_time(rows, memory, "memory needed")
    xy["color"] = _by_kind(dict(zip(kinds, itertools.cycle(_COLOURS), strict=False)), 8)
    points = xy | {"tooltip": tooltip(scheme="plan", peak_text="needs", seconds_text="step", kind="with")}
    rules, far = _limit("y", limit, most, memory, x=4, dy=-5, align="left")  # on the right is the end of the curve
    spec = chart(
        values,
        *rules,
        layer("line", xy, interpolate="step-after"),
        layer("point", points, filled=True, size=60, opacity=1),
    )
    fits = "what is below the line fits" if rules else "all of them fit" if limit else "there is no limit"
    about = f"Each point is a plan that no other undercuts in both; {fits}. Times are estimated.{far}"
    return Picture("Memory against time", about, spec, wide=True)


def error_beside_memory(rows: Values, memory: Scale) -> Picture:
    """Return a chart of the peak and the distance of the gradient from the exact model's."""
    ticks, least = _ticks([row["gradient_error"] for row in rows])
    values = [{**row, "drawn": row["peak_bytes"] / memory.factor} for row in rows]
    _place_names(values, [math.log1p(row["gradient_error"] / least) for row in values])
    scale = {"type": "symlog", "constant": least, "nice": False, "domainMin": 0}
    labels = {"values": ticks, "labelExpr": "format(datum.value, '.3~g')"}
    x = axis("gradient_error", "relative error of the gradient", scale=scale, axis=labels)
    xy = {"x": x, "y": axis("drawn", f"peak ({memory.unit})")}
    points = xy | {"tooltip": tooltip(scheme="scheme", peak_text="peak", gradient_error_text="gradient error")}
    spec = chart(
        values,
        layer("point", points, size=90, strokeWidth=2, filled=True, color=ACCENT, opacity=1),
        *([_names(xy)] if len(rows) <= _FEW else []),
    )
    about = "Relative L2 distance of one gradient from the exact model's. Zero is the exact gradient."
    return Picture("Gradient error and memory", about, spec)


_FEW_POWERS = 3


def _ticks(values: Sequence[float]) -> tuple[list[float], float]:
    """Return ticks at powers of ten for amounts that may be zero, and the least power."""
    positive = [value for value in values if value > 0]
    if not positive:
        return [0.0, 1.0], 1.0
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    stride = max(1, (last - first + 4) // 5)
    between = (1, 2, 5) if last - first <= _FEW_POWERS else (1,)
    return [0.0, *(many * 10.0**power for power in range(first, last + 1, stride) for many in between)], 10.0**first


_NAME_HEIGHT, _LETTER = 18, 6.5  # pixels
_WIDTHS = range(100, 1700, 50)  # of a chart, in pixels
_RIGHT = 0.6  # share of the width


def _place_names(values: list[Json], along: Sequence[float]) -> None:
    """Choose where the names of points stand: near the right end, to the left of a point, where there is room.

    ``room`` is the least width of the chart in which a name overlaps none of the frontier's, nor an earlier one.
    """
    shares = []
    for numbers in (along, [row["drawn"] for row in values]):
        least, most = min(numbers), max(numbers)
        shares.append([(number - least) / ((most - least) or 1) for number in numbers])
    across, up = shares
    for row, share in zip(values, across, strict=True):
        row["at_right"], row["room"] = share > _RIGHT, 0
    ranked = sorted(range(len(values)), key=lambda place: not values[place].get("frontier", True))
    for width in _WIDTHS:
        shown: list[tuple[float, float, float]] = []
        for place in ranked:
            length = _LETTER * len(values[place]["scheme"])
            start = across[place] * width + (-8 - length if values[place]["at_right"] else 8)
            end, at = start + length, up[place] * _HEIGHT
            if any(start < right and left < end and abs(at - other) < _NAME_HEIGHT for left, right, other in shown):
                values[place]["room"] = width + _WIDTHS.step
            else:
                shown.append((start, end, at))


def _names(xy: Json, where: Json | None = None) -> Json:
    """Return the names of schemes beside their points; the pointer shows names that are cut or left out."""
    align, dx = {"expr": "datum.at_right ? 'right' : 'left'"}, {"expr": "datum.at_right ? -8 : 8"}
    room, text = {"expr": "width < datum.room ? 0 : 1"}, xy | {"text": nominal("scheme")}
    return layer("text", text, where=where, color=INK, fontSize=11.5, opacity=room, align=align, dx=dx, dy=-8)


_BAR = 21  # pixels


# on a narrow page labels are cut
_ROW_NAMES: Json = {"labelLimit": {"expr": "label_limit"}, "ticks": False, "domain": False, "labelPadding": 8}


def stacked_bars(parts: Values, colours: Mapping[str, str], scale: Scale, limit: int | None) -> Picture:
    """Return a bar for each row with the parts of its peak; ``colours`` gives the order of kinds, from the left."""
    totals: dict[str, float] = {}
    for part in parts:
        totals[part["name"]] = totals.get(part["name"], 0) + part["bytes"]
    present = {kind: colour for kind, colour in colours.items() if any(part["kind"] == kind for part in parts)}
    rules, far = _limit("x", limit, max(totals.values()), scale, y=0, dy=-6, align="center")
    encoding = {
        "y": nominal("name", sort=list(totals), title=None, axis=_ROW_NAMES),
        "x": {"field": "drawn", "type": "quantitative", "stack": "zero", "title": f"peak ({scale.unit})"},
        "order": {"field": "order", "type": "quantitative"},
        "color": _by_kind(present, 22 if rules else 8),
        "tooltip": tooltip(name="scheme", kind="kind", text="bytes", peak_text="peak"),
    }
    spec = chart(parts, layer("bar", encoding, height={"band": 0.78}), *rules, height=_BAR * len(totals))
    return Picture("The peak by kind", f"What is allocated at the peak, by kind.{far}", spec, wide=True)


def largest_batches(rows: Values) -> Picture:
    """Return a bar for each row as long as its largest batch."""
    names = [row["name"] for row in rows]
    place = {
        "y": nominal("name", sort=names, title=None, axis=_ROW_NAMES),
        "x": axis("largest_batch", "rows", scale={"zero": True}),
        "tooltip": tooltip(name="scheme", largest_batch="largest batch"),
    }
    number = {**place, "text": nominal("largest_batch")}
    bars, numbers = layer("bar", place, height={"band": 0.78}, color=ACCENT), layer("text", number, align="left", dx=4)
    spec = chart(rows, bars, numbers, height=_BAR * len(names))
    return Picture("The largest batch", "How many rows of a batch fit; with one more a step does not.", spec, wide=True)


COLOURS: dict[Kind, str] = {
    "weights": "#5b7fa6",
    "gradients": "#dfa551",
    "optimizer": "#8f78ad",
    "saved": "#cf6a63",
    "packed": "#b9487f",
    "cache": "#7d5ba6",
    "engine": "#4f9aa8",
    "batch": "#9a9a9a",
    "kept": "#a5745a",
    "communication": "#c9b458",
    "temporary": "#67a58a",
}
"""Colours of the kinds that add up to the peak."""

_NAMED = 3  # holders that the text names
_FEW_SPANS = 5


def memory_over_steps(timelines: Sequence[tuple[str, Timeline]]) -> list[Picture]:
    """Return the bytes alive over steps that are compared, each with the name of its row; all have the same axes."""
    # what lies in host memory is no part of the peak
    most = max((max(each.peak_bytes, *each.held_bytes.get("host", [0])) for _, each in timelines), default=0)
    longest = max((timeline.events for _, timeline in timelines), default=0)
    return [_memory_over_step(name, timeline, most, longest) for name, timeline in timelines]


def _memory_over_step(name: str, timeline: Timeline, most: int, longest: int) -> Picture:
    scale, colours = scale_of(most), {TITLES[kind]: COLOURS[kind] for kind in COLOURS if kind in timeline.held_bytes}
    kinds, alive = list(colours), f"alive ({scale.unit})"
    values = [
        {
            "at": moment,
            "total": round(total / scale.factor, 6),
            **{TITLES[kind]: round(held[place] / scale.factor, 6) for kind, held in timeline.held_bytes.items()},
        }
        for place, (moment, total) in enumerate(zip(timeline.moments, timeline.totals, strict=True))
    ]
    x = {"x": axis("at", "allocations and frees", scale={"nice": False, "domain": [0, longest]})}
    y = {"field": "drawn", "type": "quantitative"}
    stacked = y | {"title": alive, "scale": {"domain": [0, most / scale.factor], "nice": True}, "stack": "zero"}
    order = {"field": "order", "type": "quantitative"}
    areas = layer(
        "area",
        x | {"y": stacked, "order": order, "color": _by_kind(colours, 22)},
        interpolate="step-after",
        line=False,
        opacity=0.9,
    )
    fold = [{"fold": kinds, "as": ["kind", "drawn"]}, {"calculate": f"indexof({kinds!r}, datum.kind)", "as": "order"}]
    layers = [areas | {"transform": fold}]
    has_host = "host" in timeline.held_bytes
    if has_host:
        held = {"field": TITLES["host"], "type": "quantitative", "title": alive}
        layers.append(layer("line", x | {"y": held}, interpolate="step-after", color=INK, strokeDash=[4, 3]))
    spans = [{"at": span.start, "phase": span.phase} for span in timeline.spans]
    layers.append(layer("rule", x, data=spans, color=DIM, strokeDash=[2, 3]))
    if len(spans) <= _FEW_SPANS:
        text = x | {"text": nominal("phase")}
        layers.append(layer("text", text, data=spans, color=DIM, y=-6, align="left", baseline="bottom"))
    peak = [{"at": timeline.peak_event, "drawn": timeline.peak_bytes / scale.factor}]
    layers.append(layer("point", x | {"y": y}, data=peak, size=70, filled=True, color=INK, opacity=1))
    amounts = [{"field": kind, "type": "quantitative", "format": ".5~g"} for kind in kinds]
    layers.append(
        layer("rule", x | {"tooltip": [{"field": "total", "title": alive}, *amounts]}, opacity=0, strokeWidth=6)
    )
    largest = "; ".join(
        f"{display_holder(each)}, {TITLES[each.kind]} of {each.operator}, {format_bytes(each.held_bytes)}"
        for each in [holder for holder in timeline.holders if holder.kind != "host"][:_NAMED]
    )
    host = " Dashed: what lies in host memory, no part of the peak." if has_host else ""
    about = f"The dot is the peak, {format_bytes(timeline.peak_bytes)}. Most of it: {largest}.{host}"
    return Picture(plain(f"Memory over a step: {name}"), plain(about), chart(values, *layers), wide=True)
