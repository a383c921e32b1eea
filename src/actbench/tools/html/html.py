"""The page as lines of HTML: charts, and tables whose cells are text; numbers also have their full value, to sort by.

A browser runs only our scripts and the chart library, whose hashes the page names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from actbench.report.plain import plain
from actbench.report.render.formats import Cells, cells, readable, unbroken
from actbench.report.tables import Table
from actbench.report.tables.values import Column, Value
from actbench.tools.html import library
from actbench.tools.html.pictures import MOST_DETAILED, Beside, Details, Group


def html_page(tables: Sequence[Table], title: str, beside: Beside | None = None) -> str:
    """Return a page; see :func:`html_lines`."""
    return "".join(html_lines(tables, title, beside))


def html_lines(tables: Sequence[Table], title: str, beside: Beside | None = None) -> Iterator[str]:
    """Yield the lines of a page that needs no other file and no network.

    If the library that draws charts is not installed, the page has none and says so. Without scripts the tables can
    still be read.
    """
    beside = beside or Beside()
    groups = beside.groups if library.is_installed() else ()
    scripts = [resource("page.js"), *([library.script(), resource("charts.js")] if groups else [])]
    yield from page(title, _body(tables, title, beside, groups), _data(groups, beside.details), scripts)


def page(title: str, body: Iterable[str], data: Any, scripts: Sequence[str], style: str = "") -> Iterator[str]:
    """Yield the lines of a page: ``body`` between its heading and ``data``, which the scripts read."""
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    # a browser runs these scripts and no others, and loads nothing
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
    yield f"<title>{html.escape(plain(title))}</title>\n<style>{resource('page.css')}{style}</style>\n</head>\n<body>\n"
    yield f"<h1>{html.escape(plain(title))}</h1>\n"
    yield from body
    yield f'<script type="application/json" id="data">{_json(data)}</script>\n'
    yield from (f"<script>{script}</script>\n" for script in scripts)
    yield "</body>\n</html>\n"


def _body(tables: Sequence[Table], title: str, beside: Beside, groups: Sequence[Group]) -> Iterator[str]:
    yield from (line for table in tables[:1] if table.title == title for line in _lead(table))
    if groups:
        yield _CHARTS
    elif beside.has_charts:
        yield f"<p class=missing>This page has no charts: the library that draws them is missing. {_INSTALL}</p>\n"
    if beside.lacks_details:
        yield f"<p class=missing>Rows of tables with more than {MOST_DETAILED:,} have no settings to open here.</p>\n"
    for place, table in enumerate(tables):
        yield from section(table, beside.details if place == 0 else (), heading=table.title != title)


_INSTALL = f"Install it: <code>{html.escape(library.EXTRA)}</code>"
_CHARTS = (
    '<section id="charts"><div class="tools"><label>Charts of <select id="group"></select></label></div>'
    '<div class="grid"></div><ul class="remarks"></ul></section>\n'
)


def _data(groups: Sequence[Group], details: Sequence[Details]) -> dict[str, Any]:
    """Return the data for the scripts: charts, each text of the details once, and the indices of each row's texts."""
    texts: dict[str, int] = {}
    rows = [{heading: texts.setdefault(text, len(texts)) for heading, text in each.texts.items()} for each in details]
    drawn = [
        {
            "name": group.name,
            "remarks": group.remarks,
            "pictures": [
                {"title": picture.title, "about": picture.about, "wide": picture.is_wide, "spec": picture.spec}
                for picture in group.pictures
            ],
        }
        for group in groups
    ]
    return {"texts": list(texts), "rows": rows, "groups": drawn}


_ESCAPED = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def _json(value: Any) -> str:
    """Write JSON that cannot end the script or be markup, whatever names it holds."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)


def resource(name: str) -> str:
    """Return the text of a file beside this one."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


_LONGEST_LINE = 26  # most characters of a cell that is not wrapped
SHOWN_DETAIL = 1
"""Columns of more detail are shown only when a reader asks for all."""


@dataclass(frozen=True)
class _Form:
    """What all cells of a column share: their class, and whether they have a value to sort by."""

    mark: str
    has_value: bool


def _lead(table: Table) -> Iterator[str]:
    yield from (f'<p class="lead">{html.escape(plain(line))}</p>\n' for line in table.lead)


def section(table: Table, details: Sequence[Details], *, heading: bool) -> Iterator[str]:
    """Yield the lines of a table with its notes and code; ``details`` belong to its rows, and may be empty.

    The lead stands below the heading; without one it is expected above.
    """
    table, text = readable(table), cells(table)
    yield "<section>\n"
    if heading:
        yield f"<h2>{html.escape(table.title)}</h2>\n"
        yield from _lead(table)
    if text.columns:
        yield from _grid(table, text, details)
    if table.notes:
        yield f'<ul class="notes">{"".join(f"<li>{html.escape(note)}</li>" for note in table.notes)}</ul>\n'
    for title, code in table.code:
        yield f"<details><summary>{html.escape(plain(title))}</summary><pre>{html.escape(code)}</pre></details>\n"
    yield "</section>\n"


def _grid(table: Table, text: Cells, details: Sequence[Details]) -> Iterator[str]:
    forms = [_form(column, text.frame[column.key]) for column in text.columns]
    titles = (
        f"<th{form.mark}>{html.escape(unbroken(title))}</th>" for title, form in zip(text.headings, forms, strict=True)
    )
    opener = '<th class="opener"></th>' if details else ""
    yield f'<div class="scroll"><table>\n<thead><tr>{opener}{"".join(titles)}</tr></thead>\n<tbody>\n'
    values = [
        table.frame[column.key] if form.has_value else repeat(None)
        for column, form in zip(text.columns, forms, strict=True)
    ]
    starts = map(_start, details) if details else repeat("<tr>")
    rows = zip(text.rows, zip(*values, strict=False), starts, strict=False)
    yield from (f"{start}{''.join(map(_cell, forms, row, raw))}</tr>\n" for row, raw, start in rows)
    yield "</tbody>\n</table></div>\n"


def _form(column: Column[Any], texts: Iterable[str]) -> _Form:
    is_number = column.unit not in ("text", "flag")
    is_long = not is_number and max(map(len, texts), default=0) > _LONGEST_LINE
    names = [*(["number"] if is_number else []), *(["long"] if is_long else [])]
    if column.detail > SHOWN_DETAIL:
        names.append("more")
    return _Form(f' class="{" ".join(names)}"' if names else "", is_number)


def _start(details: Details) -> str:
    """Return the beginning of a row that can be opened, with a mark if its time is estimated."""
    mark = '<abbr title="the time of the step is estimated">est.</abbr>' if details.is_estimated else ""
    return f'<tr{" class=estimated" if details.is_estimated else ""}><td class="opener">{mark}</td>'


def _cell(form: _Form, text: str, value: Value) -> str:
    raw = "" if value is None else f' data-value="{html.escape(str(value))}"'
    return f"<td{form.mark}{raw}>{html.escape(text)}</td>"
