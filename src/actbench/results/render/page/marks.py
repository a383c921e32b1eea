"""Parts of Vega-Lite charts: scales of bytes and seconds, tooltips, bars and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actbench.results.render.page.pictures import Picture, Values
from actbench.units import GIB, KIB, MIB, format_bytes

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
HEIGHT = 300
_FEW_POWERS = 3
_STEP = 21  # pixels of one bar
_LONGEST_LABEL = 420  # pixels


@dataclass(frozen=True)
class Scale:
    """The unit of a chart, and its size in base units."""

    unit: str
    factor: float


def byte_scale(most: float) -> Scale:
    """Return the unit that suits amounts up to this many bytes."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if most >= factor:
            return Scale(unit, factor)
    return Scale("bytes", 1)


def second_scale(most: float) -> Scale:
    """Return the unit that suits times up to this many seconds."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if most >= factor:
            return Scale(unit, factor)
    return Scale("µs", 1e-6)


def spec(values: Values, layers: Sequence[Mapping[str, Any]], height: int = HEIGHT) -> dict[str, Any]:
    """Return a chart of layers over the same values, as wide as its place on the page.

    Marks may use the page's light or dark colours by name: ``ink``, ``dim`` and ``accent``.
    """
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": list(values)},
        "layer": list(layers),
    }


def tooltip(**titles: str) -> list[dict[str, str]]:
    """Return the fields, with titles, that the pointer shows beside a mark."""
    return [{"field": field, "title": title, "type": "nominal"} for field, title in titles.items()]


def axis(field: str, title: str, **details: Any) -> dict[str, Any]:
    """Return an encoding of numbers along an axis that need not begin at zero."""
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False, "nice": True}, **details}


def colour(name: str) -> dict[str, str]:
    """Return a colour of the page."""
    return {"expr": name}


def colours_of(kinds: Mapping[str, str], *, offset: int) -> dict[str, Any]:
    """Return the encoding of kinds by their colours, with a legend so many pixels above the chart."""
    names = list(kinds)
    return {
        "field": "kind",
        "type": "nominal",
        "sort": names,
        "scale": {"domain": names, "range": list(kinds.values())},
        "legend": {"orient": "top", "title": None, "offset": offset},
    }


def limit_line(channel: str, limit: int, scale: Scale) -> list[dict[str, Any]]:
    """Return a named line at the memory limit."""
    place = {"datum": limit / scale.factor, "type": "quantitative"}
    data: dict[str, Any] = {"values": [{}]}
    return [
        {
            "data": data,
            "mark": {"type": "rule", "color": colour("ink"), "strokeDash": [5, 4]},
            "encoding": {channel: place},
        },
        {
            "data": data,
            "mark": {
                "type": "text",
                "text": f"limit {format_bytes(limit)}",
                "color": colour("ink"),
                **_NAME_PLACES[channel],
            },
            "encoding": {channel: place},
        },
    ]


_NAME_PLACES: dict[str, dict[str, Any]] = {
    "x": {"y": 0, "dy": -6, "align": "center", "baseline": "bottom"},
    "y": {"x": "width", "dy": -5, "align": "right", "baseline": "bottom"},
}


def stacked_bars(parts: Values, kinds: Mapping[str, str], scale: Scale, limit: int | None) -> Picture:
    """Return a bar for each row with the parts of its peak; ``kinds`` gives colours, and the order from the left."""
    names = list(dict.fromkeys(part["name"] for part in parts))
    present = [kind for kind in kinds if any(part["kind"] == kind for part in parts)]
    bars = {
        "mark": {"type": "bar", "height": {"band": 0.78}},
        "encoding": {
            "y": {
                "field": "name",
                "type": "nominal",
                "sort": names,
                "title": None,
                "axis": {"labelLimit": _LONGEST_LABEL, "ticks": False, "domain": False, "labelPadding": 8},
            },
            "x": {"field": "drawn", "type": "quantitative", "stack": "zero", "title": f"peak ({scale.unit})"},
            "order": {"field": "order", "type": "quantitative"},
            "color": colours_of({kind: kinds[kind] for kind in present}, offset=22 if limit else 8),
            "tooltip": tooltip(name="scheme", kind="kind", text="bytes", peak_text="peak"),
        },
    }
    rules = limit_line("x", limit, scale) if limit else []
    about = "What is allocated at the moment when the most is, by kind."
    return Picture("The peak by kind", about, spec(parts, [bars, *rules], _STEP * len(names)), is_wide=True)


def ticks_of(values: Sequence[float]) -> tuple[list[float], float]:
    """Return ticks at powers of ten for amounts that may be zero, and the least power."""
    positive = [value for value in values if value > 0]
    if not positive:
        return [0.0, 1.0], 1.0
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    stride = max(1, (last - first + 4) // 5)
    between = (1, 2, 5) if last - first <= _FEW_POWERS else (1,)
    return [0.0, *(many * 10.0**power for power in range(first, last + 1, stride) for many in between)], 10.0**first
