"""The charts of pages: what is drawn of rows, of curves and of steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from actbench.model.timeline import TITLES, Kind, Timeline
from actbench.report.plain import plain
from actbench.report.tables import Curve, Table
from actbench.report.tables.step import display_holder
from actbench.report.tables.values import write
from actbench.tools.html.charts import ACCENT, BYTES, DASHED, SECONDS, Chart, Picture, bands, linear, powers
from actbench.units import format_bytes

CYCLE = ("#5b7fa6", "#cf6a63", "#67a58a", "#8f78ad", "#dfa551", "#9a9a9a", "#b07aa1", "#9c755f")
"""Colours of curves, in turn."""
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
"""Colours of the kinds that add up to the peak, in the order of the stack."""

_FAR = 2  # a limit that is so many times as large as all that is drawn would leave no room for it
_FEW = 12  # the names of more points would overlap
_BAR = 21  # pixels
_NAMED = 3  # holders that the text names
_FEW_SPANS = 5


class Row(NamedTuple):
    """What charts draw of a measured case.

    Attributes:
        name: What no other row is called.
        label: What the pointer shows of it.
        peak_bytes: Most bytes allocated.
        seconds: Of a step; None if it was not timed.
        is_best: Whether no other row of its meter beats it in both memory and time.
        gradient_error: Relative distance of the gradient from the exact model's; None if it was not asked for.
        largest_batch: The largest batch that fits; None if it was not asked for.
        parts: Bytes of the peak, by the title of the kind.
    """

    name: str
    label: str
    meter: str
    peak_bytes: int
    seconds: float | None
    is_estimated: bool
    is_best: bool
    gradient_error: float | None
    largest_batch: int | None
    parts: Mapping[str, int]


def limit_of(limit: int | None, most: float) -> tuple[list[int], str]:
    """Return a memory limit where it is near enough to be drawn, and a sentence in its place where it is far away."""
    if limit is None:
        return [], ""
    if 0 < _FAR * most <= limit:
        return [], f" The limit, {format_bytes(limit)}, is {limit / most:.3g} times the most that is shown."
    return [limit], ""


def memory_against_time(rows: Sequence[tuple[Row, float]], limit: int | None) -> Picture:
    """Return the frontier chart of rows with their seconds; a row that another beats in both is faded."""
    peaks = [row.peak_bytes for row, _ in rows]
    over = [limit] if limit is not None and max(peaks) > limit else []
    x, y = linear("time of a step", [seconds for _, seconds in rows], SECONDS), linear("peak", [*peaks, *over], BYTES)
    chart = Chart(x, y)
    for each in over:
        chart.rule(f"limit {format_bytes(each)}", y=each)
    for meter in dict.fromkeys(row.meter for row, _ in rows):
        if best := sorted((seconds, row.peak_bytes) for row, seconds in rows if row.is_best and row.meter == meter):
            chart.line(best, is_stepped=True, **DASHED)
    for row, seconds in rows:
        shape, fill = ("diamond", "none") if row.is_estimated else ("circle", ACCENT)
        style = {"stroke": ACCENT, "stroke_width": "2", "opacity": "1" if row.is_best else "0.3", "fill": fill}
        chart.dot(seconds, row.peak_bytes, row.label, shape, **style)
    ranked = sorted(rows, key=lambda each: not each[0].is_best)
    named = [each for each in ranked if len(rows) <= _FEW or each[0].is_best or each[0].name == "exact"]
    chart.names((seconds, row.peak_bytes, row.name) for row, seconds in named)
    hollow = " Hollow: the time is estimated." if any(row.is_estimated for row, _ in rows) else ""
    about = f"Lower left is better. Faded: another row needs less memory and less time.{hollow}"
    return Picture("Memory against time", about, chart)


def error_beside_memory(rows: Sequence[tuple[Row, float]]) -> Picture:
    """Return a chart of the peak and the distance of the gradient from the exact model's, of rows with this error."""
    x = powers("relative error of the gradient", [error for _, error in rows])
    chart = Chart(x, linear("peak", [row.peak_bytes for row, _ in rows], BYTES))
    for row, error in rows:
        chart.dot(error, row.peak_bytes, row.label, fill=ACCENT, stroke="none")
    if len(rows) <= _FEW:
        chart.names((error, row.peak_bytes, row.name) for row, error in rows)
    about = "Relative L2 distance of one gradient from the exact model's. Zero is the exact gradient."
    return Picture("Gradient error and memory", about, chart)


def stacked_bars(rows: Sequence[Row], limit: int | None) -> Picture:
    """Return a bar for each row with the parts of its peak."""
    totals = [sum(row.parts.values()) for row in rows]
    limits, far = limit_of(limit, max(totals))
    titles = {TITLES[kind]: colour for kind, colour in COLOURS.items()}
    colours = {title: colour for title, colour in titles.items() if any(title in row.parts for row in rows)}
    x, y = linear("peak", [0, *totals, *limits], BYTES), bands([row.name for row in rows])
    chart = Chart(x, y, height=_BAR * len(rows), is_wide=True, legend=colours, has_lines=False)
    for place, row in enumerate(rows):
        begin = 0
        for title, colour in colours.items():
            if held := row.parts.get(title, 0):
                chart.bar(place, begin, begin + held, f"{title} {format_bytes(held)}\nof {row.label}", colour)
                begin += held
    for each in limits:
        chart.rule(f"limit {format_bytes(each)}", x=each)
    return Picture("The peak by kind", f"What is allocated at the peak, by kind.{far}", chart)


def largest_batches(rows: Sequence[tuple[str, int]]) -> Picture:
    """Return a bar for each named row as long as its largest batch."""
    x, y = linear("rows", [0, *(batch for _, batch in rows)]), bands([name for name, _ in rows])
    chart = Chart(x, y, height=_BAR * len(rows), is_wide=True, has_lines=False)
    for place, (name, batch) in enumerate(rows):
        chart.bar(place, 0, batch, f"{name}\nlargest batch {batch}", ACCENT)
        across, middle = chart.at(batch, place)
        chart.text(across + 4, middle + 4, str(batch))
    return Picture("The largest batch", "How many rows of a batch fit; with one more a step does not.", chart)


def curves_of_tables(tables: Sequence[Table]) -> dict[str, Picture]:
    """Return, by name, one chart of all tables whose curves are drawn together: their rows, and the limit."""
    charts: dict[str, list[tuple[Curve, Table]]] = {}
    for table in tables:
        if table.curve is not None:
            charts.setdefault(table.curve.chart, []).append((table.curve, table))
    return {plain(name): _curves(drawn) for name, drawn in charts.items()}


def _curves(drawn: Sequence[tuple[Curve, Table]]) -> Picture:
    found = {
        curve: [
            (float(row[curve.seconds] or 0), int(row[curve.bytes] or 0), plain(str(row[curve.label])))
            for row in table.rows
        ]
        for curve, table in reversed(drawn)  # what is drawn last is above the others
    }
    limit = next((curve.limit_bytes for curve, _ in drawn if curve.limit_bytes), None)
    needs = [need for points in found.values() for _, need, _ in points]
    limits, far = limit_of(limit, max(needs))
    x = linear("time of a step", [seconds for points in found.values() for seconds, _, _ in points], SECONDS)
    legend = dict(zip((curve.name for curve in found), itertools.cycle(CYCLE), strict=False))
    chart = Chart(x, linear("memory needed", [*needs, *limits], BYTES), is_wide=True, legend=legend)
    for each in limits:
        chart.rule(f"limit {format_bytes(each)}", y=each)
    for curve, points in found.items():
        colour = legend[curve.name]
        chart.line(sorted(point[:2] for point in points), is_stepped=True, stroke=colour, stroke_width=2)
        for seconds, need, name in points:
            texts = f"needs {write(need, 'bytes')}\nstep {write(seconds, 'seconds')}\nwith {curve.name}"
            chart.dot(seconds, need, f"{name}\n{texts}", fill=colour, stroke="none")
    fits = "what is below the line fits" if limits else "all of them fit" if limit else "there is no limit"
    about = f"Each point is a plan that no other undercuts in both; {fits}. Times are estimated.{far}"
    return Picture("Memory against time", about, chart)


def memory_over_steps(timelines: Sequence[tuple[str, Timeline]]) -> list[Picture]:
    """Return the bytes alive over steps that are compared, each with the name of its row; all have the same axes."""
    # what lies in host memory is no part of the peak
    most = max((max(each.peak_bytes, *each.held_bytes.get("host", [0])) for _, each in timelines), default=0)
    longest = max((timeline.events for _, timeline in timelines), default=0)
    return [_memory_over_step(name, timeline, most, longest) for name, timeline in timelines]


def _memory_over_step(name: str, timeline: Timeline, most: int, longest: int) -> Picture:
    colours = {kind: colour for kind, colour in COLOURS.items() if kind in timeline.held_bytes}
    x, y = linear("allocations and frees", [0, longest], is_exact=True), linear("alive", [0, most], BYTES)
    legend = {TITLES[kind]: colour for kind, colour in colours.items()}
    chart = Chart(x, y, is_wide=True, legend=legend)
    moments = timeline.moments
    below = [0] * len(moments)
    for kind, colour in colours.items():
        above = [under + held for under, held in zip(below, timeline.held_bytes[kind], strict=True)]
        back = list(zip(moments, below, strict=True))[::-1]
        chart.line(zip(moments, above, strict=True), is_stepped=True, back=back, fill=colour, stroke="none")
        below = above
    if "host" in timeline.held_bytes:
        chart.line(zip(moments, timeline.held_bytes["host"], strict=True), is_stepped=True, **DASHED)
    for span in timeline.spans:
        chart.rule(span.phase if len(timeline.spans) <= _FEW_SPANS else "", x=span.start)
    chart.dot(timeline.peak_event, timeline.peak_bytes, "the peak", fill="currentColor", stroke="none")
    ends = [*moments[1:], timeline.events]
    for place, (begin, end, total) in enumerate(zip(moments, ends, timeline.totals, strict=True)):
        held = "".join(f"\n{TITLES[kind]} {format_bytes(timeline.held_bytes[kind][place])}" for kind in colours)
        (left, top), (right, bottom) = chart.at(begin, most), chart.at(end, 0)
        told, width = f"alive {format_bytes(total)}{held}", max(right - left, 1.0)
        chart.mark("rect", told, x=left, y=top, width=width, height=bottom - top, fill_opacity=0)
    largest = "; ".join(
        f"{display_holder(each)}, {TITLES[each.kind]} of {each.operator}, {format_bytes(each.held_bytes)}"
        for each in [holder for holder in timeline.holders if holder.kind != "host"][:_NAMED]
    )
    host = " Dashed: what lies in host memory, no part of the peak." if "host" in timeline.held_bytes else ""
    about = f"The dot is the peak, {format_bytes(timeline.peak_bytes)}. Most of it: {largest}.{host}"
    return Picture(plain(f"Memory over a step: {name}"), plain(about), chart)
