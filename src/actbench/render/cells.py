"""A table as text for people: every cell and heading is written once here, and each format only lays them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actbench.plain import plain
from actbench.tables import Table
from actbench.tables.columns import Column
from actbench.tables.rows import Rows
from actbench.tables.values import Value, write

_ARROWS = {"lower": " ↓", "higher": " ↑"}


@dataclass(frozen=True)
class Cells:
    """The text of a table.

    Attributes:
        headings: One for each column; an arrow says which direction is better.
        numeric: Whether each column holds numbers, which stand at the right.
        columns: The text of each cell, by column.
    """

    headings: tuple[str, ...]
    numeric: tuple[bool, ...]
    columns: tuple[Sequence[str], ...]

    @property
    def rows(self) -> Iterator[tuple[str, ...]]:
        """The text of each cell, by row."""
        return zip(*self.columns, strict=True)


def spoken(table: Table) -> Table:
    """Return a table without the columns that tell people nothing, its title and notes as plain text."""
    columns = tuple(column for column in table.columns if not column.quiet)
    return replace(table, title=plain(table.title), columns=columns, notes=tuple(map(plain, table.notes)))


def cells(table: Table) -> Cells:
    """Write a table as text; a spread stands behind its value with a plus-minus."""
    table = spoken(table)
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
    texts = [write(value, column.unit) for value in _values(table, column)]
    return list(map(plain, texts)) if column.unit == "text" else texts


def _values(table: Table, column: Column[Any]) -> Sequence[Value]:
    rows = table.rows
    return rows.column(column.key) if isinstance(rows, Rows) else [row[column.key] for row in rows]
