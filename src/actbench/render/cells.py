"""A table as text for people: every cell and heading is written once here, and each format only lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from actbench.plain import plain
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
        rows: The text of each cell.
    """

    headings: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]


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
        tuple(tuple(_cell(row, column, spreads.get(column.key)) for column in shown) for row in table.rows),
    )


def _cell(row: Mapping[str, Value], column: Column[Any], spread: Column[Any] | None) -> str:
    text = plain(write(row[column.key], column.unit))
    if spread is None or row[spread.key] is None:
        return text
    return f"{text} ± {write(row[spread.key], spread.unit)}"
