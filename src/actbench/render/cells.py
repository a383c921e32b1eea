"""A table as text for people: every cell and heading is written once here, and each format only lays them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actbench.tables import Table
from actbench.tables.columns import Column
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
    """Return a table without the columns that tell people nothing."""
    return replace(table, columns=tuple(column for column in table.columns if not column.quiet))


def cells(table: Table) -> Cells:
    """Write a table as text; a spread stands behind its value with a plus-minus."""
    table = spoken(table)
    spreads = {column.spread_of: column for column in table.columns if column.spread_of}
    shown = [column for column in table.columns if not column.spread_of]
    columns: tuple[list[str], ...] = tuple([] for _ in shown)
    places = [(texts, column, spreads.get(column.key)) for texts, column in zip(columns, shown, strict=True)]
    for row in table.rows:
        for texts, column, spread in places:
            texts.append(_cell(row, column, spread))
    return Cells(
        tuple(column.title + _ARROWS.get(column.better or "", "") for column in shown),
        tuple(column.unit not in ("text", "flag") for column in shown),
        columns,
    )


def _cell(row: Mapping[str, Value], column: Column[Any], spread: Column[Any] | None) -> str:
    text = write(row[column.key], column.unit)
    if spread is None or row[spread.key] is None:
        return text
    return f"{text} ± {write(row[spread.key], spread.unit)}"
