"""A table of the page: cells are text, and numbers also have their full value, for sorting."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from actbench.results.render.formats import Cells, cells, readable, unbroken
from actbench.results.render.page.pictures import Details
from actbench.results.tables import Table
from actbench.results.tables.columns import Column
from actbench.results.tables.values import Rows, Value

_LONGEST_LINE = 26  # most characters of a cell that is not wrapped
SHOWN_DETAIL = 1
"""Columns of more detail are shown only when a reader asks for all."""


@dataclass(frozen=True)
class _Form:
    """What all cells of a column share: their class, and whether they have a value to sort by."""

    mark: str
    has_value: bool


def section(table: Table, details: Sequence[Details], *, heading: bool) -> Iterator[str]:
    """Yield the lines of a table with its notes; ``details`` belong to its rows, and may be empty."""
    table, text = readable(table), cells(table)
    columns = [column for column in table.columns if not column.within]
    yield "<section>\n"
    if heading:
        yield f"<h2>{html.escape(table.title)}</h2>\n"
    if columns:
        yield from _grid(table, text, columns, details)
    if table.notes:
        yield f'<ul class="notes">{"".join(f"<li>{html.escape(note)}</li>" for note in table.notes)}</ul>\n'
    yield "</section>\n"


def _grid(table: Table, text: Cells, columns: Sequence[Column[Any]], details: Sequence[Details]) -> Iterator[str]:
    forms = list(map(_form, columns, text.columns))
    titles = map(_heading, text.headings, forms)
    opener = '<th class="opener"></th>' if details else ""
    yield f'<div class="scroll"><table>\n<thead><tr>{opener}{"".join(titles)}</tr></thead>\n<tbody>\n'
    values = [
        _values(table, column) if form.has_value else repeat(None) for column, form in zip(columns, forms, strict=True)
    ]
    starts = map(_start, details) if details else repeat("<tr>")
    rows = zip(text.rows, zip(*values, strict=False), starts, strict=False)
    yield from (f"{start}{''.join(map(_cell, forms, row, raw))}</tr>\n" for row, raw, start in rows)
    yield "</tbody>\n</table></div>\n"


def _form(column: Column[Any], texts: Sequence[str]) -> _Form:
    is_number = column.unit not in ("text", "flag")
    is_long = not is_number and max(map(len, texts), default=0) > _LONGEST_LINE
    names = [*(["number"] if is_number else []), *(["long"] if is_long else [])]
    if column.detail > SHOWN_DETAIL:
        names.append("more")
    return _Form(f' class="{" ".join(names)}"' if names else "", is_number)


def _heading(title: str, form: _Form) -> str:
    return f"<th{form.mark}>{html.escape(unbroken(title))}</th>"


def _start(details: Details) -> str:
    """Return the beginning of a row that can be opened, with a mark if its time is estimated."""
    mark = '<abbr title="the time of the step is estimated">est.</abbr>' if details.is_estimated else ""
    return f'<tr{" class=estimated" if details.is_estimated else ""}><td class="opener">{mark}</td>'


def _cell(form: _Form, text: str, value: Value) -> str:
    raw = "" if value is None else f' data-value="{html.escape(str(value))}"'
    return f"<td{form.mark}{raw}>{html.escape(text)}</td>"


def _values(table: Table, column: Column[Any]) -> Sequence[Value]:
    rows = table.rows
    return rows.column(column.key) if isinstance(rows, Rows) else [row[column.key] for row in rows]
