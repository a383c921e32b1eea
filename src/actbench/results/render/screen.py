"""A table on a terminal, where a line says what does not fit, or as plain lines in a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from actbench.results.render.formats import Cells, cells, readable
from actbench.results.tables import Table

LIMIT = 500
"""Rows that a terminal shows, and notes."""

_LINES_AT_ONCE = 1000
_BOX = box.SIMPLE_HEAD


@dataclass(frozen=True)
class Screen:
    """The first rows of a table as a rich renderable, in as many columns as fit."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = readable(self.table)
        table = fitted(replace(whole, rows=whole.rows[:LIMIT]), options.max_width)
        yield from console.render(_grid(table), options)
        left_out = [column.title for column in whole.columns if not (column.spread_of or column in table.columns)]
        if left_out:
            yield Text(f"Left out here, for want of width: {', '.join(left_out)}.", style="dim")
        for note in table.notes[:LIMIT]:
            yield Text(note, style="dim")
        if len(whole.rows) > LIMIT or len(table.notes) > LIMIT:
            yield Text(_left_out(len(whole.rows), len(table.notes)), style="dim")


def show(table: Table, console: Console) -> None:
    """Print a table with its notes; a pipe gets every row and every column."""
    if console.is_terminal:
        console.print(Screen(table), crop=False)
        return
    lines = _lines(table, console.options)
    while block := list(islice(lines, _LINES_AT_ONCE)):
        console.file.write("\n".join([*block, ""]))


def fitted(table: Table, width: int) -> Table:
    """Return the table with as few columns left out as it takes to fit in ``width`` characters."""
    shown = [column for column in readable(table).columns if not column.spread_of]
    widths = dict(zip(shown, (each + 2 for each in _widths(cells(table))), strict=True))  # a space and a divider
    while sum(widths.values()) > width:
        detail = max(column.detail for column in widths)
        if detail == 0:
            break
        del widths[[column for column in widths if column.detail == detail][-1]]
    keys = {column.key for column in widths}
    return replace(
        table, columns=tuple(column for column in table.columns if keys.intersection((column.key, column.spread_of)))
    )


def _left_out(rows: int, notes: int) -> str:
    """Say how many rows and notes are not shown, and where they are."""
    counts = ((rows - LIMIT, "row"), (notes - LIMIT, "note"))
    found = [f"{more:,} more {what}{'s' if more > 1 else ''}" for more, what in counts if more > 0]
    return (
        f"Left out here: {' and '.join(found)}. A pipe (… | less -S) gets all, and so do exports that hold this table "
        "(--export-csv FILE)."
    )


def _grid(table: Table) -> Grid:
    text = cells(table)
    grid = Grid(title=Text(table.title, style="bold"), title_justify="left", box=_BOX, pad_edge=False)
    grid.padding = (0, 1, 0, 0)
    for heading, numeric, width in zip(text.headings, text.numeric, _widths(text), strict=True):
        grid.add_column(
            Text("\n".join(_wrapped(heading, width))),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    for row in text.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def _lines(table: Table, options: ConsoleOptions) -> Iterator[str]:
    """Yield the lines of a whole table, laid out as rich does a hundred times slower."""
    table, text = readable(table), cells(table)
    if text.headings:
        if table.title:
            yield table.title
        yield from _grid_lines(replace(text, columns=tuple(map(_unfolded, text.columns))), _BOX.substitute(options))
    else:
        yield ""
    yield from table.notes


def _grid_lines(text: Cells, lines: box.Box) -> Iterator[str]:
    widths = _widths(text)
    padded = [width + 1 for width in widths[:-1]] + widths[-1:]
    wrapped = [_wrapped(title, width) for title, width in zip(text.headings, widths, strict=True)]
    height = max(map(len, wrapped))
    headings = [[""] * (height - len(parts)) + parts for parts in wrapped]  # they stand at the bottom
    yield lines.get_top(padded)
    for row in _aligned(headings, text.numeric, widths, f" {lines.head_vertical}"):
        yield lines.head_left + row + lines.head_right
    yield lines.get_row(padded, "head")
    for row in _aligned(text.columns, text.numeric, widths, f" {lines.mid_vertical}"):
        yield lines.mid_left + row + lines.mid_right
    yield lines.get_bottom(padded)


def _aligned(
    columns: Sequence[Sequence[str]], numeric: Sequence[bool], widths: Sequence[int], divider: str
) -> Iterator[str]:
    """Yield rows with every cell as wide as its column."""
    places, filled = [], []
    for texts, is_number, width in zip(columns, numeric, widths, strict=True):
        align, size = ">" if is_number else "<", _size(texts)
        if size is len:
            places.append(f"{{:{align}{width}}}")
            filled.append(texts)
        else:  # format takes every letter for one place, and some take two or none
            places.append("{}")
            filled.append([f"{text:{align}{width - size(text) + len(text)}}" for text in texts])
    return map(divider.join(places).format, *filled)


def _unfolded(texts: Sequence[str]) -> Sequence[str]:
    """Return texts without line ends: a row is one line."""
    return texts if "".join(texts).isprintable() else [" ".join(text.split()) for text in texts]


def _widths(text: Cells) -> list[int]:
    """Return the width of each column: that of its longest cell, or of the longest word of its heading."""
    return [
        max(map(_size(texts), [*_unbroken(heading).split(" "), *texts]))
        for heading, texts in zip(text.headings, text.columns, strict=True)
    ]


def _size(texts: Sequence[str]) -> Callable[[str], int]:
    """Return the function that counts the terminal cells of a text."""
    letters = "".join(texts)
    return len if letters.isascii() or all(cell_len(letter) == 1 for letter in set(letters)) else cell_len


def _wrapped(heading: str, width: int) -> list[str]:
    return textwrap.wrap(_unbroken(heading), width)


def _unbroken(heading: str) -> str:
    """Tie the arrow to the word before it."""
    return heading.replace(" ↓", "\xa0↓").replace(" ↑", "\xa0↑")
