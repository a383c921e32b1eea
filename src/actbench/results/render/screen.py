"""A table on a terminal, with a line about what does not fit, or as plain lines in a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from actbench.results.render.formats import Cells, readable
from actbench.results.render.widths import fitted, size, widths, wrapped
from actbench.results.tables import Table

LIMIT = 500
"""Most rows, and most notes, on a terminal."""

_LINES_AT_ONCE = 1000
_BOX = box.SIMPLE_HEAD


@dataclass(frozen=True)
class Screen:
    """The first rows of a table as a rich renderable, in as many columns as fit."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = readable(self.table)
        shown = fitted(replace(table, rows=table.rows[:LIMIT]), options.max_width)
        yield from console.render(_grid(table.title, shown.text), options)
        for line in [*shown.told, *table.notes[:LIMIT]]:
            yield Text(line, style="dim")
        if len(table.rows) > LIMIT or len(table.notes) > LIMIT:
            yield Text(_left_out(len(table.rows), len(table.notes)), style="dim")


def show(table: Table, console: Console) -> None:
    """Print a table with its notes at the width of the console; a pipe gets every row."""
    if console.is_terminal:
        console.print(Screen(table), crop=False)
        return
    lines = _lines(readable(table), console.options)
    while block := list(islice(lines, _LINES_AT_ONCE)):
        console.file.write("\n".join([*block, ""]))


def _left_out(rows: int, notes: int) -> str:
    """Return how many rows and notes are not shown, and where to find them."""
    counts = ((rows - LIMIT, "row"), (notes - LIMIT, "note"))
    found = [f"{more:,} more {what}{'s' if more > 1 else ''}" for more, what in counts if more > 0]
    return (
        f"Left out here: {' and '.join(found)}. A pipe (… | less -S) gets all, and so do exports that hold this table "
        "(--export-csv FILE)."
    )


def _grid(title: str, text: Cells) -> Grid:
    grid = Grid(title=Text(title, style="bold"), title_justify="left", box=_BOX, pad_edge=False)
    grid.padding = (0, 1, 0, 0)
    for heading, numeric, width in zip(text.headings, text.numeric, widths(text), strict=True):
        grid.add_column(
            Text("\n".join(wrapped(heading, width))),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    for row in text.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def _lines(table: Table, options: ConsoleOptions) -> Iterator[str]:
    """Yield the lines of a whole readable table; the layout is rich's, at a hundredth of the time."""
    told: list[str] = []
    if table.columns:
        if table.title:
            yield table.title
        shown = fitted(table, options.max_width)
        text, told = shown.text, shown.told
        yield from _grid_lines(replace(text, columns=tuple(map(_unfolded, text.columns))), _BOX.substitute(options))
    else:
        yield ""
    for note in (*told, *table.notes):
        yield from textwrap.wrap(note, options.max_width, break_long_words=False, break_on_hyphens=False) or [""]


def _grid_lines(text: Cells, lines: box.Box) -> Iterator[str]:
    sizes = widths(text)
    padded = [width + 1 for width in sizes[:-1]] + sizes[-1:]
    parts_of = [wrapped(title, width) for title, width in zip(text.headings, sizes, strict=True)]
    height = max(map(len, parts_of))
    headings = [[""] * (height - len(parts)) + parts for parts in parts_of]  # headings align at the bottom
    yield lines.get_top(padded)
    for row in _aligned(headings, text.numeric, sizes, f" {lines.head_vertical}"):
        yield lines.head_left + row + lines.head_right
    yield lines.get_row(padded, "head")
    for row in _aligned(text.columns, text.numeric, sizes, f" {lines.mid_vertical}"):
        yield lines.mid_left + row + lines.mid_right
    yield lines.get_bottom(padded)


def _aligned(
    columns: Sequence[Sequence[str]], numeric: Sequence[bool], sizes: Sequence[int], divider: str
) -> Iterator[str]:
    """Yield rows with every cell as wide as its column."""
    places, filled = [], []
    for texts, is_number, width in zip(columns, numeric, sizes, strict=True):
        align, length = ">" if is_number else "<", size(texts)
        if length is len:
            places.append(f"{{:{align}{width}}}")
            filled.append(texts)
        else:  # str.format counts each character as one cell, but some take two or none
            places.append("{}")
            filled.append([f"{text:{align}{width - length(text) + len(text)}}" for text in texts])
    return map(divider.join(places).format, *filled)


def _unfolded(texts: Sequence[str]) -> Sequence[str]:
    """Return texts without line ends: a row is one line."""
    return texts if "".join(texts).isprintable() else [" ".join(text.split()) for text in texts]
