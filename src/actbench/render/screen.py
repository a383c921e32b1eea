"""A table on a terminal: in a narrow one, columns of detail are left out, and a line says so."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from actbench.render.cells import Cells, cells, spoken
from actbench.tables import Table


@dataclass(frozen=True)
class Screen:
    """A table as a rich renderable. What is not a terminal, such as a pipe, gets every column however wide."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay out the columns that fit, then the notes."""
        whole = spoken(self.table)
        table = fitted(whole, options.max_width) if console.is_terminal else whole
        grid = _grid(table)
        width = options.max_width if console.is_terminal else max(options.max_width, _width(table))
        yield from console.render(grid, options.update(width=width))
        left_out = [column.title for column in whole.columns if not (column.spread_of or column in table.columns)]
        if left_out:
            yield Text(f"Left out here, for want of width: {', '.join(left_out)}.", style="dim")
        for note in table.notes:
            yield Text(note, style="dim")


def show(table: Table, console: Console) -> None:
    """Print a table, and its notes below."""
    console.print(Screen(table), crop=False, soft_wrap=not console.is_terminal)


def fitted(table: Table, width: int) -> Table:
    """Return the table with as few columns left out as it takes to fit in ``width`` characters."""
    while _width(table) > width:
        detail = max((column.detail for column in table.columns), default=0)
        if detail == 0:
            break
        last = [column for column in table.columns if column.detail == detail][-1]
        kept = (column for column in table.columns if last.key not in (column.key, column.spread_of))
        table = replace(table, columns=tuple(kept))
    return table


def _grid(table: Table) -> Grid:
    text = cells(table)
    grid = Grid(title=Text(table.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    grid.padding = (0, 1, 0, 0)
    for heading, numeric, width in zip(text.headings, text.numeric, _widths(text), strict=True):
        lines = Text("\n".join(textwrap.wrap(_unbroken(heading), width)))
        grid.add_column(lines, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in text.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def _width(table: Table) -> int:
    """Return the width at which no cell need be broken: one space and one divider behind each column."""
    return sum(width + 2 for width in _widths(cells(table)))


def _widths(text: Cells) -> list[int]:
    """Return the width of each column: that of its longest cell, or of the longest word of its heading."""
    columns = zip(text.headings, *text.rows, strict=True)
    return [max(map(len, [*_unbroken(heading).split(" "), *column])) for heading, *column in columns]


def _unbroken(heading: str) -> str:
    """Tie the arrow to the word before it."""
    return heading.replace(" ↓", "\xa0↓").replace(" ↑", "\xa0↑")
