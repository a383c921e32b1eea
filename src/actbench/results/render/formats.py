"""A table as Markdown, CSV and HTML, and records as JSON; the ``_lines`` functions make lines as they are asked for."""

from __future__ import annotations

import csv
import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actbench.results.plain import csv_cell, plain
from actbench.results.plain import markdown as marked
from actbench.results.records import Record
from actbench.results.tables import Table
from actbench.results.tables.columns import Column
from actbench.results.tables.values import Rows, Value, write

_REPEATED = {"text", "count", "flag"}  # units of which many rows have few values
_ARROWS = {"lower": " ↓", "higher": " ↑"}


@dataclass(frozen=True)
class Cells:
    """The text of a table by column; headings have arrows for which direction is better, numbers stand at the right."""

    headings: tuple[str, ...]
    numeric: tuple[bool, ...]
    columns: tuple[Sequence[str], ...]

    @property
    def rows(self) -> Iterator[tuple[str, ...]]:
        """The text of each cell, by row."""
        return zip(*self.columns, strict=True)


def readable(table: Table) -> Table:
    """Return a table without its quiet columns, its title and notes as plain text."""
    columns = tuple(column for column in table.columns if not column.quiet)
    return replace(table, title=plain(table.title), columns=columns, notes=tuple(map(plain, table.notes)))


def cells(table: Table) -> Cells:
    """Write a table as text; a spread stands behind its value with a plus-minus."""
    table = readable(table)
    spreads = {column.spread_of: column for column in table.columns if column.spread_of}
    shown = [column for column in table.columns if not column.spread_of]
    return Cells(
        tuple(plain(column.title) + _ARROWS.get(column.better or "", "") for column in shown),
        tuple(column.unit not in ("text", "flag") for column in shown),
        tuple(_texts(table, column, spreads.get(column.key)) for column in shown),
    )


def _texts(table: Table, column: Column[Any], spread: Column[Any] | None) -> list[str]:
    texts = _written(table, column)
    if spread is None:
        return texts
    known = [value is not None for value in _values(table, spread)]
    return [
        f"{text} ± {deviation}" if is_known else text
        for text, deviation, is_known in zip(texts, _written(table, spread), known, strict=True)
    ]


def _written(table: Table, column: Column[Any]) -> list[str]:
    values = _values(table, column)
    if column.unit not in _REPEATED:
        return [write(value, column.unit) for value in values]
    texts = {value: plain(write(value, column.unit)) for value in set(values)}
    return [texts[value] for value in values]


def _values(table: Table, column: Column[Any]) -> Sequence[Value]:
    rows = table.rows
    return rows.column(column.key) if isinstance(rows, Rows) else [row[column.key] for row in rows]


def markdown(table: Table) -> str:
    """Return a section of Markdown: title, table, and notes as a list."""
    return "".join(markdown_lines(table))


def markdown_lines(table: Table) -> Iterator[str]:
    """Yield the lines of a section of Markdown."""
    table, text = readable(table), cells(table)
    yield f"## {marked(table.title)}".rstrip() + "\n"
    if text.headings:
        yield "\n"
        yield _markdown_row(map(marked, text.headings))
        yield _markdown_row("---:" if numeric else "---" for numeric in text.numeric)
        yield from (_markdown_row(map(marked, row)) for row in text.rows)
    if table.notes:
        yield "\n"
        yield from (f"- {marked(note)}\n" for note in table.notes)


def _markdown_row(row: Iterable[str]) -> str:
    return "| " + " | ".join(row) + " |\n"


def csv_text(table: Table) -> str:
    """Return CSV: column keys as the heading, raw values in bytes and seconds, empty for unknown."""
    return "".join(csv_lines(table))


def csv_lines(table: Table) -> Iterator[str]:
    """Yield the lines of CSV."""
    writer = csv.writer(_Line(), lineterminator="\n")
    yield writer.writerow([column.key for column in table.columns])
    for row in table.rows:
        yield writer.writerow([csv_cell(value) if isinstance(value, str) else value for value in row.values()])


class _Line:
    """A file whose ``write``, and so ``writerow``, returns the text."""

    def write(self, text: str) -> Any:
        return text


def json_text(records: Sequence[Record[Any, Any]]) -> str:
    """Return the records as a JSON list, each as it stands in a results file."""
    return "".join(json_lines(records))


def json_lines(records: Sequence[Record[Any, Any]]) -> Iterator[str]:
    """Yield the lines of a JSON list of records."""
    before = "["
    for record in records:
        yield f"{before}\n  " + record.model_dump_json(indent=2).replace("\n", "\n  ")
        before = ","
    yield "\n]\n" if records else "[]\n"


def html_page(tables: Sequence[Table], title: str) -> str:
    """Return a page without scripts or other files."""
    return "".join(html_lines(tables, title))


def html_lines(tables: Sequence[Table], title: str) -> Iterator[str]:
    """Yield the lines of a page without scripts or other files."""
    yield f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(plain(title))}</title>\n'
    yield f"<style>{_STYLE}</style>\n"
    for table in tables:
        yield from _html_section(table)
    yield "</html>\n"


def _html_section(table: Table) -> Iterator[str]:
    table, text = readable(table), cells(table)
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in text.headings)
    yield f"<h2>{html.escape(table.title)}</h2>\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
    yield from (f"<tr>{_html_cells(row, text.numeric)}</tr>\n" for row in text.rows)
    yield "</tbody>\n</table>\n"
    if table.notes:
        yield f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in table.notes)}</ul>\n"


def _html_cells(row: Sequence[str], numeric: Sequence[bool]) -> str:
    marks = ((cell, ' class="number"' if is_number else "") for cell, is_number in zip(row, numeric, strict=True))
    return "".join(f"<td{mark}>{html.escape(cell)}</td>" for cell, mark in marks)


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#222;background:#fff}"
    "table{border-collapse:collapse}th,td{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #ddd}"
    ".number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}li{color:#666}"
)
