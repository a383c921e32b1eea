"""Tables and measurements as small fragments of HTML for notebooks, in the look of the pages of ``--export-html``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final

from actbench.display import Displayed
from actbench.model.advice import PHASES
from actbench.model.measured import Measurement
from actbench.report.advice import needed_bytes
from actbench.report.render.formats import cells, readable
from actbench.report.render.screen import NOTE_LINES
from actbench.report.tables import Table, results_table
from actbench.report.tables.step import PEAK_KINDS
from actbench.units import format_bytes, format_seconds

MOST_ROWS: Final = 100

_STYLE: Final = (
    "<style>.actbench{font:13.5px/1.45 system-ui,sans-serif;max-width:75rem}"
    ".actbench .bar{position:relative;display:flex;height:1.4rem;margin:.4rem 0;background:#8883;max-width:50rem}"
    ".actbench .limit{position:absolute;top:-.2rem;bottom:-.2rem;border-left:2px solid #c0392b}"
    ".actbench i{display:inline-block;width:.7rem;height:.7rem;margin:0 .25rem 0 .8rem}"
    ".actbench table{border-collapse:collapse;font-size:13px}.actbench th{font-weight:600;opacity:.7}"
    ".actbench th,.actbench td{text-align:left!important;padding:.25rem .6rem;border-bottom:1px solid #8884}"
    ".actbench .number{text-align:right!important;font-variant-numeric:tabular-nums}"
    ".actbench .notes{opacity:.7;font-size:12px}.actbench .missing{color:#c0392b}</style>"
)
_COLOURS: Final = (
    *("#33658f", "#2a9d8f", "#8d5a97", "#e0a030", "#6a994e"),
    *("#c06fa0", "#7d8597", "#b5534c", "#4aa3c4", "#9aa3ad"),
)


def fragment(shown: Displayed) -> str:
    """Return what a notebook shows of an object: itself, a table of its records, or what its ``drawn()`` returns."""
    records, drawn = getattr(shown, "records", None), getattr(shown, "drawn", None)
    parts = [shown] if drawn is None else drawn()
    if drawn is None and records is not None:
        parts = [results_table(records, f"{records[0].case.model}, batch {records[0].case.batch_size}")]
    return f'{_STYLE}<div class="actbench">{"".join(map(_part, parts))}</div>'


def _part(shown: Table | Measurement | str) -> str:
    if isinstance(shown, str):
        return f"<p>{escape(shown)}</p>"
    return "".join(_table(shown) if isinstance(shown, Table) else _measurement(shown))


def _measurement(measured: Measurement) -> Iterator[str]:
    """Yield the answer of a measurement: what the step needs, whether it fits, and the bar of its peak."""
    limit, needed = measured.memory_limit_bytes, needed_bytes(measured)
    where = f" in the {PHASES[measured.peak_phase]}" if measured.peak_phase else ""
    mark = "at most " if measured.at_most else "~" if measured.approximate else ""
    gaps = f", {format_bytes(needed)} with gaps of the allocator" if needed > measured.peak_bytes else ""
    yield f"<p><b>Peak {mark}{format_bytes(measured.peak_bytes)}</b>{where}{gaps}"
    if measured.over_limit_bytes is not None and limit is not None:
        yield f', <b class="missing">{format_bytes(measured.over_limit_bytes)} more than the {format_bytes(limit)}</b>'
    elif limit is not None:
        yield f" of {format_bytes(limit)}: it fits"
    if measured.estimated is not None:
        yield f"; a step takes {format_seconds(measured.estimated.step_seconds)} (est.)"
    if measured.largest_batch is not None:
        yield f"; the largest batch is {measured.largest_batch}"
    yield "</p>"
    if measured.peak_parts is not None and needed:
        yield from _bar(measured, max(needed, limit or 0), limit)


def _bar(measured: Measurement, most: int, limit: int | None) -> Iterator[str]:
    held = measured.peak_parts.model_dump() if measured.peak_parts else {}
    parts = [
        (title, held[name], colour)
        for (name, title), colour in zip(PEAK_KINDS.items(), _COLOURS, strict=True)
        if held[name]
    ]
    yield '<div class="bar">'
    for title, amount, colour in parts:
        named = escape(f"{title} {format_bytes(amount)}", quote=True)
        yield f'<span title="{named}" style="width:{100 * amount / most:.2f}%;background:{colour}"></span>'
    if limit is not None:
        yield f'<span class="limit" title="limit {format_bytes(limit)}" style="left:{100 * limit / most:.2f}%"></span>'
    yield "</div><p>"
    for title, amount, colour in sorted(parts, key=lambda part: -part[1]):
        yield f'<i style="background:{colour}"></i>{escape(title)} {format_bytes(amount)}'
    yield "</p>"


def _table(table: Table) -> Iterator[str]:
    table = readable(table)
    text = cells(table)
    classes = ['class="number"' if numeric else "" for numeric in text.numeric]
    yield "".join(f"<p><b>{escape(line)}</b></p>" for line in (table.title, *table.lead) if line)
    yield f"<table><thead>{_row('th', text.headings, classes)}</thead><tbody>"
    for place, row in enumerate(text.rows):
        if place == MOST_ROWS:
            break
        yield _row("td", row, classes)
    yield "</tbody></table>"
    more = [f"{len(table.frame) - MOST_ROWS} more rows"] if len(table.frame) > MOST_ROWS else []
    notes = sorted(table.notes, key=lambda note: note in table.details)
    more += [*notes[:NOTE_LINES], *([f"{len(notes) - NOTE_LINES} more notes"] if len(notes) > NOTE_LINES else [])]
    yield f'<div class="notes">{"<br>".join(map(escape, more))}</div>' if more else ""


def _row(tag: str, texts: Sequence[Any], classes: Sequence[str]) -> str:
    row = (f"<{tag} {kind}>{escape(text)}</{tag}>" for text, kind in zip(texts, classes, strict=True))
    return f"<tr>{''.join(row)}</tr>"
