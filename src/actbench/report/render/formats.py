"""A table as Markdown and CSV, and records as JSON; the ``_lines`` functions yield lines one by one."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actbench.model.records import Record
from actbench.report.plain import csv_cell, markdown as marked, plain
from actbench.report.tables import Table
from actbench.report.tables.values import Column, Rows, Value, write

_REPEATED = {"text", "count", "flag"}  # units of columns in which many rows have few values
PLUS_MINUS = " ± "
_ARROWS = {"lower": " ↓", "higher": " ↑"}


@dataclass(frozen=True)
class Cells:
    """The text of a table by column; an arrow in a heading shows which direction is better; numbers align right."""

    headings: tuple[str, ...]
    numeric: tuple[bool, ...]
    columns: tuple[Sequence[str], ...]

    @property
    def rows(self) -> Iterator[tuple[str, ...]]:
        """The text of each cell, by row."""
        return zip(*self.columns, strict=True)


def readable(table: Table) -> Table:
    """Return a table without its quiet columns, with title and notes as plain text."""
    columns = tuple(column for column in table.columns if not column.quiet)
    notes, lead = tuple(map(plain, table.notes)), tuple(map(plain, table.lead))
    return replace(table, title=plain(table.title), columns=columns, notes=notes, lead=lead)


def cells(table: Table) -> Cells:
    """Write a table as text; a spread follows its value after a plus-minus, and an estimate fills an empty cell."""
    table = readable(table)
    spreads = {column.spread_of: column for column in table.columns if column.spread_of}
    estimates = {column.estimate_of: column for column in table.columns if column.estimate_of}
    shown = [column for column in table.columns if not column.within]
    return Cells(
        tuple(plain(column.title) + _ARROWS.get(column.better or "", "") for column in shown),
        tuple(column.unit not in ("text", "flag") for column in shown),
        tuple(_texts(table, column, spreads.get(column.key), estimates.get(column.key)) for column in shown),
    )


def unbroken(heading: str) -> str:
    """Tie the arrow to the word before it with a no-break space."""
    return heading.replace(" ↓", "\xa0↓").replace(" ↑", "\xa0↑")


def _texts(table: Table, column: Column[Any], spread: Column[Any] | None, estimate: Column[Any] | None) -> list[str]:
    texts = _written(table, column)
    if spread is not None:
        texts = [
            f"{text}{PLUS_MINUS}{written}" if value is not None else text
            for text, written, value in zip(texts, _written(table, spread), values_of(table, spread), strict=True)
        ]
    if estimate is not None:
        texts = [
            estimate.mark.format(written) if value is not None else text
            for text, written, value in zip(texts, _written(table, estimate), values_of(table, estimate), strict=True)
        ]
    return texts


def _written(table: Table, column: Column[Any]) -> list[str]:
    values = values_of(table, column)
    if column.unit not in _REPEATED:
        return [write(value, column.unit) for value in values]
    texts = {value: plain(write(value, column.unit)) for value in set(values)}
    return [texts[value] for value in values]


def values_of(table: Table, column: Column[Any]) -> Sequence[Value]:
    """Return the raw values of a column of a table."""
    rows = table.rows
    return rows.column(column.key) if isinstance(rows, Rows) else [row[column.key] for row in rows]


def markdown(table: Table) -> str:
    """Return a section of Markdown: title, lead, table, notes as a list, and code."""
    return "".join(markdown_lines(table))


def markdown_lines(table: Table) -> Iterator[str]:
    """Yield the lines of a section of Markdown."""
    table, text = readable(table), cells(table)
    yield f"## {marked(table.title)}".rstrip() + "\n"
    yield from (f"\n{marked(line)}\n" for line in table.lead)
    if text.headings:
        yield "\n"
        yield _markdown_row(map(marked, text.headings))
        yield _markdown_row("---:" if numeric else "---" for numeric in text.numeric)
        yield from (_markdown_row(map(marked, row)) for row in text.rows)
    if table.notes:
        yield "\n"
        yield from (f"- {marked(note)}\n" for note in table.notes)
    for heading, code in table.code:
        yield f"\n{marked(heading)}:\n\n"
        yield from (f"    {line}".rstrip() + "\n" for line in code.splitlines())


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
    """A file whose ``write`` returns the text, so that ``writerow`` does too."""

    def write(self, text: str) -> Any:
        return text


def json_text(records: Sequence[Record[Any, Any]]) -> str:
    """Return the records as a JSON list, each with the fields of a results file."""
    return "".join(json_lines(records))


def json_lines(records: Sequence[Record[Any, Any]]) -> Iterator[str]:
    """Yield the lines of a JSON list of records."""
    before = "["
    for record in records:
        yield f"{before}\n  " + record.model_dump_json(indent=2).replace("\n", "\n  ")
        before = ","
    yield "\n]\n" if records else "[]\n"
