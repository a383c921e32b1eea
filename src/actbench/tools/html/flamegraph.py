"""A page with flame graphs: who holds the memory of a step, by line of the script, module and operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from actbench.model.advice import PHASES
from actbench.model.timeline import TITLES, Timeline
from actbench.report.exporting import Exported
from actbench.report.plain import plain
from actbench.report.render.stacks import frames_of, stacks
from actbench.tools.html.html import html_lines
from actbench.tools.html.pictures import COLOURS
from actbench.units import format_bytes


def flame_page(what: Exported, timelines: Sequence[tuple[str, Timeline]]) -> Iterator[str]:
    """Yield the pieces of a page with a flame graph for each titled timeline, and the tables below them."""
    graphs = [_graph(title, timeline) for title, timeline in timelines]
    kinds = {TITLES[kind]: colour for kind, colour in COLOURS.items()}
    return html_lines(what.tables, what.title, graphs={"graphs": graphs, "kinds": kinds})


def _graph(title: str, timeline: Timeline) -> dict[str, Any]:
    """Return what the script draws of a step: the stacks of its peak, and those of sampled moments by their changes.

    Both have the same bytes at the peak, of which the stacks are those of the table below.
    """
    held = [(frames_of(each), TITLES[each.kind], each.readings) for each in timeline.sampled]
    live = [0] * len(timeline.samples)
    for _, _, readings in held:
        for (place, amount, _), ended in zip(readings, [*(each[0] for each in readings[1:]), len(live)], strict=True):
            for later in range(place, ended):
                live[later] += amount
    return {
        "name": f"{plain(title)}: {format_bytes(timeline.peak_bytes)}",
        "events": timeline.events,
        "peak": [timeline.peak_event, PHASES[timeline.peak_phase], timeline.peak_bytes],
        "stacks": [
            [list(map(plain, each.frames)), TITLES[each.kind], each.held_bytes, each.tensors]
            for each in stacks(timeline)
        ],
        "moments": [
            [moment, PHASES[timeline.phase_at(moment)], amount]
            for moment, amount in zip(timeline.samples, live, strict=True)
        ],
        "sampled": [[list(map(plain, frames)), kind, readings] for frames, kind, readings in held],
    }
