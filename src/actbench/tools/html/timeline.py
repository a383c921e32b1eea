"""A chart of the memory over a step, by kind, with the parts of the step and the peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actbench.model.timeline import TITLES, Kind, Timeline
from actbench.report.plain import plain
from actbench.report.tables.step import display_holder
from actbench.tools.html.pictures import Picture, Scale, axis, byte_scale, colour, colours_of, spec
from actbench.units import format_bytes

COLOURS: dict[Kind, str] = {
    "weights": "#5b7fa6",
    "gradients": "#dfa551",
    "optimizer": "#8f78ad",
    "saved": "#cf6a63",
    "packed": "#b9487f",
    "cache": "#7d5ba6",
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
    most = max((_highest(timeline) for _, timeline in timelines), default=0)
    longest = max((timeline.events for _, timeline in timelines), default=0)
    return [memory_over_step(name, timeline, most, longest) for name, timeline in timelines]


def memory_over_step(name: str, timeline: Timeline, most: int = 0, longest: int = 0) -> Picture:
    """Return the bytes alive over a step as stacked areas.

    Args:
        name: Of the row.
        timeline: What is drawn.
        most: Bytes that the axis has at least.
        longest: Allocations and frees that the other axis has at least.
    """
    most, longest = max(most, _highest(timeline)), max(longest, timeline.events)
    scale = byte_scale(most)
    kinds = [kind for kind in COLOURS if kind in timeline.held_bytes]
    titles = [TITLES[kind] for kind in kinds]
    x = axis("at", "allocations and frees", scale={"nice": False, "domain": [0, longest]})
    domain = {"domain": [0, most / scale.factor], "nice": True}
    y = {"field": "drawn", "type": "quantitative", "title": f"alive ({scale.unit})", "scale": domain}
    areas = {
        "transform": [
            {"fold": titles, "as": ["kind", "drawn"]},
            {"calculate": f"indexof({titles!r}, datum.kind)", "as": "order"},
        ],
        "mark": {"type": "area", "interpolate": "step-after", "line": False, "opacity": 0.9},
        "encoding": {
            "x": x,
            "y": {**y, "stack": "zero"},
            "order": {"field": "order", "type": "quantitative"},
            "color": colours_of({TITLES[kind]: COLOURS[kind] for kind in kinds}, offset=22),
        },
    }
    amounts = [{"field": title, "type": "quantitative", "format": ".5~g"} for title in titles]
    pointer = {
        "mark": {"type": "rule", "opacity": 0, "strokeWidth": 6},
        "encoding": {"x": x, "tooltip": [{"field": "total", "title": f"alive ({scale.unit})"}, *amounts]},
    }
    layers = [areas, *_host(timeline, x, scale), *_spans(timeline, x), *_peak(timeline, x, scale), pointer]
    columns = {TITLES[kind]: held for kind, held in timeline.held_bytes.items()}
    values = [
        {
            "at": moment,
            "total": round(total / scale.factor, 6),
            **{title: round(held[place] / scale.factor, 6) for title, held in columns.items()},
        }
        for place, (moment, total) in enumerate(zip(timeline.moments, timeline.totals, strict=True))
    ]
    chart = spec(values, layers)
    return Picture(plain(f"Memory over a step: {name}"), _about(timeline), chart, is_wide=True)


def _highest(timeline: Timeline) -> int:
    """Return the most bytes that a chart shows; what lies in host memory is no part of the peak."""
    return max([timeline.peak_bytes, *timeline.held_bytes.get("host", ())])


def _host(timeline: Timeline, x: dict[str, Any], scale: Scale) -> list[dict[str, Any]]:
    if "host" not in timeline.held_bytes:
        return []
    mark = {"type": "line", "interpolate": "step-after", "color": colour("ink"), "strokeDash": [4, 3]}
    y = {"field": TITLES["host"], "type": "quantitative", "title": f"alive ({scale.unit})"}
    return [{"mark": mark, "encoding": {"x": x, "y": y}}]


def _spans(timeline: Timeline, x: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line at the beginning of each part of the step, with its name if there are few parts."""
    data = {"values": [{"at": span.start, "phase": span.phase} for span in timeline.spans]}
    rule = {"type": "rule", "color": colour("dim"), "strokeDash": [2, 3]}
    text = {"type": "text", "color": colour("dim"), "y": -6, "align": "left", "baseline": "bottom"}
    named = {"data": data, "mark": text, "encoding": {"x": x, "text": {"field": "phase", "type": "nominal"}}}
    return [{"data": data, "mark": rule, "encoding": {"x": x}}, *([named] if len(timeline.spans) <= _FEW_SPANS else [])]


def _peak(timeline: Timeline, x: dict[str, Any], scale: Scale) -> list[dict[str, Any]]:
    data = {"values": [{"at": timeline.peak_event, "drawn": timeline.peak_bytes / scale.factor}]}
    y = {"field": "drawn", "type": "quantitative"}
    point = {"type": "point", "size": 70, "filled": True, "color": colour("ink"), "opacity": 1}
    return [{"data": data, "mark": point, "encoding": {"x": x, "y": y}}]


def _about(timeline: Timeline) -> str:
    """Return a text about the chart and the largest holders at the peak."""
    named = [holder for holder in timeline.holders if holder.kind != "host"][:_NAMED]
    most = "; ".join(
        f"{display_holder(each)}, {TITLES[each.kind]} of {each.operator}, {format_bytes(each.held_bytes)}"
        for each in named
    )
    host = " Dashed: what lies in host memory, no part of the peak." if "host" in timeline.held_bytes else ""
    return plain(f"The dot is the peak, {format_bytes(timeline.peak_bytes)}. Most of it: {most}.{host}")
