"""The page as lines of HTML: charts, and tables whose cells are text; numbers also have their full value, to sort by.

A browser runs only our scripts and the chart library, whose hashes the page names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from string import Template
from typing import Any, NamedTuple, TypeVar

from actbench.model.records import Failure, Record
from actbench.report.plain import plain
from actbench.report.render.formats import cells, readable, unbroken
from actbench.report.tables import Table
from actbench.report.tables.values import Value
from actbench.tools.html import library
from actbench.tools.html.charts import Picture
from actbench.units import counted

Row = TypeVar("Row")


class Group(NamedTuple):
    """The charts of rows that can be compared, under a name for the reader to choose."""

    name: str
    pictures: tuple[Picture, ...]
    remarks: tuple[str, ...] = ()


class Details(NamedTuple):
    """What the page shows when a reader opens a row of its first table, by heading."""

    texts: Mapping[str, str]
    is_estimated: bool = False


class Beside(NamedTuple):
    """What a page shows beside the tables: charts, and details of the rows of the first table, in their order."""

    groups: tuple[Group, ...] = ()
    details: tuple[Details, ...] = ()
    remark: str = ""

    @property
    def has_charts(self) -> bool:
        """Whether there is anything to draw."""
        return any(group.pictures for group in self.groups)


MOST_DETAILED = 5000
"""Most rows with settings and commands; a larger table has none, so that the file stays small."""
MOST_GROUPS = 40
"""Most groups with charts on a page: a file of a few MB opens at once."""


def beside(groups: Iterable[Group], rows: Sequence[Row], details: Callable[[Row], Details]) -> Beside:
    """Return what a page shows beside a table of rows."""
    if len(rows) <= MOST_DETAILED:
        return Beside(shown(groups), tuple(map(details, rows)))
    remark = f"Rows of tables with more than {MOST_DETAILED:,} have no settings to open here."
    return Beside(shown(groups), remark=remark)


def shown(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return the groups for a page, which opens with the first that was asked for; no others are held meanwhile.

    Of more groups than a page takes, those with the fewest charts are left out.
    """
    ranked: list[tuple[int, Group]] = []
    left_out = 0
    for place, group in enumerate(groups):
        if group.pictures:
            ranked = sorted(
                [*ranked, (place, group)], key=lambda each: -len(each[1].pictures)
            )  # of equal ones the first
            left_out += len(ranked) > MOST_GROUPS
            del ranked[MOST_GROUPS:]
    drawn = [group for _, group in sorted(ranked, key=lambda each: each[0])]
    more = (f"{left_out} more groups of rows have no charts here: make a report of fewer records.",) * bool(left_out)
    return tuple(group._replace(remarks=(*group.remarks, *more)) for group in drawn)


def texts_of(record: Record[Any, Any]) -> dict[str, str]:
    """Return the settings, command and machine of a record, by heading."""
    machine, versions, outcome = record.machine, record.versions, record.outcome
    device = f"{machine.gpu}, " if machine.gpu else ""
    commit = f" ({versions.commit[:12]}{', uncommitted changes' if versions.dirty else ''})" if versions.commit else ""
    numbers = versions.model_dump(exclude_none=True, exclude={"actbench", "commit", "dirty"})
    settings = {
        name.replace("_", " "): value
        for name, value in record.case.model_dump(exclude_none=True).items()
        if value is not False
    }
    found = {
        "Command": record.command,
        "Settings": ", ".join(name if value is True else f"{name} {value}" for name, value in settings.items()),
        "Failure": f"{outcome.reason}: {outcome.message}" if isinstance(outcome, Failure) else "",
        "Warnings": "\n".join(getattr(outcome, "warnings", ())),
        "Machine": f"{machine.name}: {device}{machine.processor}, {counted(machine.cores, 'core')}, {machine.system}",
        "Versions": f"actbench {versions.actbench}{commit}, {', '.join(f'{k} {v}' for k, v in numbers.items())}",
        "Recorded": f"{record.recorded_at}, recipe {record.recipe}",
    }
    return {heading: plain(text) for heading, text in found.items() if text}


def html_lines(tables: Sequence[Table], title: str, beside: Beside | None = None) -> Iterator[str]:
    """Yield the lines of a page that needs no other file and no network.

    If the library that draws charts is not installed, the page has none and says so. Without scripts the tables can
    still be read.
    """
    beside = beside or Beside()
    groups = beside.groups if library.is_installed() else ()
    texts: dict[str, int] = {}  # each once, with its index
    rows = [
        {heading: texts.setdefault(text, len(texts)) for heading, text in each.texts.items()} for each in beside.details
    ]
    drawn = [group._asdict() | {"pictures": [each._asdict() for each in group.pictures]} for group in groups]
    scripts = [resource("page.js"), *([library.script(), resource("charts.js")] if groups else [])]

    def body() -> Iterator[str]:
        for table in tables[:1]:
            yield from _lead(table) if table.title == title else ()
        if groups:
            yield resource("charts.html") + "\n"
        elif beside.has_charts:
            install = f"Install it: <code>{html.escape(library.EXTRA)}</code>"
            yield f"<p class=missing>This page has no charts: the library that draws them is missing. {install}</p>\n"
        if beside.remark:
            yield f"<p class=missing>{beside.remark}</p>\n"
        for place, table in enumerate(tables):
            yield from section(table, beside.details if place == 0 else (), heading=table.title != title)

    yield from page(title, body(), {"texts": list(texts), "rows": rows, "groups": drawn}, scripts)


def html_page(tables: Sequence[Table], title: str, beside: Beside | None = None) -> str:
    """Return a page; see :func:`html_lines`."""
    return "".join(html_lines(tables, title, beside))


_ESCAPED = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def page(title: str, body: Iterable[str], data: Any, scripts: Sequence[str], style: str = "") -> Iterator[str]:
    """Yield the lines of a page: ``body`` between its heading and ``data``, which the scripts read."""
    # a browser runs these scripts and no others, and loads nothing
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    style = resource("page.css") + style
    yield (
        Template(resource("page.html")).substitute(allowed=allowed, title=html.escape(plain(title)), style=style) + "\n"
    )
    yield from body
    # this JSON cannot end the script or be markup, whatever names it holds
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)
    yield f'<script type="application/json" id="data">{text}</script>\n'
    yield from (f"<script>{script}</script>\n" for script in scripts)
    yield "</body>\n</html>\n"


def resource(name: str) -> str:
    """Return the text of a file beside this one."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


def _lead(table: Table) -> Iterator[str]:
    yield from (f'<p class="lead">{html.escape(plain(line))}</p>\n' for line in table.lead)


def section(table: Table, details: Sequence[Details], *, heading: bool) -> Iterator[str]:
    """Yield the lines of a table with its notes and code; ``details`` belong to its rows, and may be empty.

    The lead stands below the heading; without one it is expected above.
    """
    table = readable(table)
    yield "<section>\n"
    if heading:
        yield f"<h2>{html.escape(table.title)}</h2>\n"
        yield from _lead(table)
    if table.columns:
        yield from _grid(table, details)
    if table.notes:
        yield f'<ul class="notes">{"".join(f"<li>{html.escape(note)}</li>" for note in table.notes)}</ul>\n'
    for title, code in table.code:
        yield f"<details><summary>{html.escape(plain(title))}</summary><pre>{html.escape(code)}</pre></details>\n"
    yield "</section>\n"


_LONGEST_LINE = 26  # most characters of a cell that is not wrapped
SHOWN_DETAIL = 1
"""Columns of more detail are shown only when a reader asks for all."""


def _grid(table: Table, details: Sequence[Details]) -> Iterator[str]:
    text = cells(table)
    marks, values = [], []
    for column, is_number in zip(text.columns, text.numeric, strict=True):
        is_long = not is_number and max(map(len, text.frame[column.key]), default=0) > _LONGEST_LINE
        names = {"number": is_number, "long": is_long, "more": column.detail > SHOWN_DETAIL}
        shown = " ".join(name for name, has in names.items() if has)
        marks.append(f' class="{shown}"' if shown else "")
        values.append(table.frame[column.key] if is_number else repeat(None))
    titles = (f"<th{mark}>{html.escape(unbroken(each))}</th>" for each, mark in zip(text.headings, marks, strict=True))
    opener = '<th class="opener"></th>' if details else ""
    yield f'<div class="scroll"><table>\n<thead><tr>{opener}{"".join(titles)}</tr></thead>\n<tbody>\n'
    starts = map(_start, details) if details else repeat("<tr>")
    for row, raw, start in zip(text.rows, zip(*values, strict=False), starts, strict=False):
        yield f"{start}{''.join(map(_cell, marks, row, raw))}</tr>\n"
    yield "</tbody>\n</table></div>\n"


def _start(details: Details) -> str:
    """Return the beginning of a row that can be opened, with a mark if its time is estimated."""
    mark = '<abbr title="the time of the step is estimated">est.</abbr>' if details.is_estimated else ""
    return f'<tr{" class=estimated" if details.is_estimated else ""}><td class="opener">{mark}</td>'


def _cell(mark: str, text: str, value: Value) -> str:
    raw = "" if value is None else f' data-value="{html.escape(str(value))}"'
    return f"<td{mark}{raw}>{html.escape(text)}</td>"
