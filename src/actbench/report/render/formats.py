"""A table as Markdown and CSV, and records as JSON; the ``_lines`` functions yield lines one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from actbench.model.records import Record
from actbench.report.plain import csv_cell, markdown as marked, plain
from actbench.report.tables import Table
from actbench.report.tables.values import Column, Value, write

if TYPE_CHECKING:
    import pandas

_REPEATED = {"text", "count", "flag"}  # units of columns in which many rows have few values
PLUS_MINUS = " ± "
_ARROWS = {"lower": " ↓", "higher": " ↑"}


@dataclass(frozen=True, eq=False)
class Cells:
    """The text of a table: its columns, and a frame of texts with their keys; numbers align right."""

    columns: tuple[Column[Any], ...]
    frame: pandas.DataFrame

    @property
    def headings(self) -> tuple[str, ...]:
        """The titles; an arrow shows which direction is better."""
        return tuple(plain(column.title) + _ARROWS.get(column.better or "", "") for column in self.columns)

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column holds numbers."""
        return tuple(column.unit not in ("text", "flag") for column in self.columns)

    @property
    def rows(self) -> Iterator[tuple[str, ...]]:
        """The text of each cell, by row."""
        return iter(self.frame.itertuples(index=False, name=None))

    @property
    def texts(self) -> dict[str, list[str]]:
        """The text of each cell, by the key of its column."""
        return {column.key: self.frame[column.key].tolist() for column in self.columns}


def readable(table: Table) -> Table:
    """Return a table without its quiet columns, with title and notes as plain text."""
    columns = tuple(column for column in table.columns if not column.quiet)
    notes, lead = tuple(map(plain, table.notes)), tuple(map(plain, table.lead))
    details = tuple(map(plain, table.details))
    return replace(table, title=plain(table.title), columns=columns, notes=notes, lead=lead, details=details)


def cells(table: Table) -> Cells:
    """Write a table as text; a spread follows its value after a plus-minus, and an estimate fills an empty cell."""
    table = readable(table)
    spreads = {column.spread_of: column for column in table.columns if column.spread_of}
    estimates = {column.estimate_of: column for column in table.columns if column.estimate_of}
    shown = tuple(column for column in table.columns if not column.within)
    texts = (_texts(table.frame, column, spreads.get(column.key), estimates.get(column.key)) for column in shown)
    return Cells(shown, framed({column.key: text for column, text in zip(shown, texts, strict=True)}, table.frame))


def framed(texts: Mapping[str, Sequence[str]], like: pandas.DataFrame) -> pandas.DataFrame:
    """Return a frame of texts by column, with the rows of another."""
    import pandas

    return pandas.DataFrame(texts, like.index, dtype=object)


def unbroken(heading: str) -> str:
    """Tie the arrow to the word before it with a no-break space."""
    return heading.replace(" ↓", "\xa0↓").replace(" ↑", "\xa0↑")


def _texts(
    frame: pandas.DataFrame, column: Column[Any], spread: Column[Any] | None, estimate: Column[Any] | None
) -> list[str]:
    texts = _written(frame, column)
    if spread is not None:
        texts = [
            f"{text}{PLUS_MINUS}{written}" if value is not None else text
            for text, written, value in zip(texts, _written(frame, spread), frame[spread.key], strict=True)
        ]
    if estimate is not None:
        texts = [
            estimate.mark.format(written) if value is not None else text
            for text, written, value in zip(texts, _written(frame, estimate), frame[estimate.key], strict=True)
        ]
    return texts


def _written(frame: pandas.DataFrame, column: Column[Any]) -> list[str]:
    values: list[Value] = frame[column.key].tolist()
    if column.unit not in _REPEATED:
        return [write(value, column.unit) for value in values]
    texts = {value: plain(write(value, column.unit)) for value in set(values)}
    return [texts[value] for value in values]


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
    texts = {column.key: list(map(_csv_value, table.frame[column.key])) for column in table.columns}
    text: str = framed(texts, table.frame).to_csv(index=False, lineterminator="\n")
    return text


def _csv_value(value: Value) -> str:
    if isinstance(value, str):
        return csv_cell(value)
    return "" if value is None else str(value)


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
