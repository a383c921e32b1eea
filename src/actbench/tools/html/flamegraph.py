"""A page with flame graphs of peaks: who holds the memory, by line of the script, module and operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from actbench.model.timeline import TITLES, Timeline
from actbench.report.exporting import Exported
from actbench.report.plain import plain
from actbench.report.render.stacks import stacks
from actbench.report.tables.step import titled_timelines
from actbench.tools.html.html import page, resource, section
from actbench.tools.html.timeline import COLOURS
from actbench.units import format_bytes

_TOOLS = (
    '<section id="flame"><div class="tools"><label>Peak of <select id="which"></select></label>'
    '<input type="search" id="search" placeholder="Search lines, modules, operators" aria-label="search frames">'
    '<label><input type="checkbox" id="invert"> inverted</label>'
    '<button type="button" id="out" hidden>zoom out</button><output id="told"></output></div>'
    '<div id="frames"></div><ul id="kinds"></ul></section>\n'
)
_STYLE = (
    "#frames{position:relative;border:1px solid var(--line);border-radius:8px;overflow:hidden}"
    "#frames button{all:unset;box-sizing:border-box;position:absolute;height:21px;padding:0 .3rem;overflow:hidden;"
    "white-space:nowrap;text-overflow:ellipsis;font-size:12px;line-height:20px;cursor:pointer;color:#111;"
    "border:solid var(--back);border-width:0 1px 1px 0}"
    "#frames button:focus-visible{outline:2px solid var(--ink);outline-offset:-2px}"
    "#frames .faint{opacity:.3}#frames .through{background:#c9cfd6}"
    "#kinds{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;padding:0;color:var(--dim);font-size:.87rem}"
    "#kinds i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}"
)


def flame_page(what: Exported, timelines: Sequence[tuple[str, Timeline]]) -> Iterator[str]:
    """Yield the lines of a page with a flame graph for each titled timeline, and the tables below them."""

    def body() -> Iterator[str]:
        yield _TOOLS
        yield "<noscript><p class=missing>The graph needs scripts; the tables do not.</p></noscript>\n"
        for table in what.tables:
            yield from section(table, (), heading=True)

    graphs = [_graph(title, timeline) for title, timeline in timelines]
    data = {"texts": [], "rows": [], "graphs": graphs, "kinds": {TITLES[kind]: COLOURS[kind] for kind in COLOURS}}
    yield from page(what.title, body(), data, [resource("page.js"), resource("flamegraph.js")], style=_STYLE)


def drawn(what: Exported) -> Iterator[str]:
    """Return the page of the records that have timelines."""
    from actbench.model.measured import MeasuredRecord

    measured = [record for record in what.records if isinstance(record, MeasuredRecord)]
    return flame_page(what, list(titled_timelines(measured)))


def _graph(title: str, timeline: Timeline) -> dict[str, Any]:
    found = stacks(timeline)
    return {
        "name": f"{plain(title)}: {format_bytes(timeline.peak_bytes)}",
        "stacks": [
            [[plain(frame) for frame in each.frames], TITLES[each.kind], each.held_bytes, each.tensors]
            for each in found
        ],
    }
