"""A page with flame graphs of peaks: who holds the memory, by line of the script, module and operator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from actbench.model.timeline import TITLES, Timeline
from actbench.report.exporting import Exported
from actbench.report.plain import plain
from actbench.report.render.stacks import stacks
from actbench.tools.html.charts import COLOURS
from actbench.tools.html.html import page, resource, section
from actbench.units import format_bytes


def flame_page(what: Exported, timelines: Sequence[tuple[str, Timeline]]) -> Iterator[str]:
    """Yield the lines of a page with a flame graph for each titled timeline, and the tables below them."""
    graphs = [
        {
            "name": f"{plain(title)}: {format_bytes(timeline.peak_bytes)}",
            "stacks": [
                [[plain(frame) for frame in each.frames], TITLES[each.kind], each.held_bytes, each.tensors]
                for each in stacks(timeline)
            ],
        }
        for title, timeline in timelines
    ]
    tables = (line for table in what.tables for line in section(table, (), heading=True))
    data = {"texts": [], "rows": [], "graphs": graphs, "kinds": {TITLES[kind]: COLOURS[kind] for kind in COLOURS}}
    scripts = [resource("page.js"), resource("flamegraph.js")]
    body = itertools.chain([resource("flamegraph.html") + "\n"], tables)
    yield from page(what.title, body, data, scripts, resource("flamegraph.css"))
