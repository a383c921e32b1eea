"""Fits a table into a width: it shortens long names in the middle, then leaves out columns, then spreads."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.cells import cell_len

from actbench.report.render.formats import PLUS_MINUS, Cells, cells, readable, unbroken
from actbench.report.tables import Table
from actbench.report.tables.values import Column

_GAP = 2  # a space and a divider between two columns
_LONG, _SHORT = 20, 12  # least length of a model's name, before and after spreads are left out
_OF_SCHEMES = (1000, 16)
_FLOORS = {
    **dict.fromkeys(("model", "module", "path", "label", "operator"), (_LONG, _SHORT)),
    **dict.fromkeys(("scheme", "plan"), _OF_SCHEMES),
}
"""By key of a column of names: its least width before, and after, spreads are left out."""

_ALIKE = {"machine", "model", "data", "batch_size", "meter", "seeds"}
"""Keys of columns that a line below the table can replace if all rows have the same value."""

SPREADS = "spreads (±)"


@dataclass(frozen=True)
class Fitted:
    """The text of a table that fits.

    Attributes:
        columns: The shown columns.
        text: Their cells.
        left_out: Titles of what is not shown.
        names: The full name of each shortened name.
        alike: Values that all rows share, by the titles of their columns, which are not shown.
    """

    columns: tuple[Column[Any], ...]
    text: Cells
    left_out: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)

    @property
    def told(self) -> list[str]:
        """Lines below the table."""
        lines = [f"{short} is {name}." for short, name in self.names.items()]
        if self.alike:
            lines.append(f"All rows: {', '.join(f'{title.lower()} {value}' for title, value in self.alike.items())}.")
        if self.left_out:
            lines.append(f"Hidden for lack of space: {', '.join(self.left_out)}.")
        return lines


def fitted(table: Table, width: int) -> Fitted:
    """Return as much of a table as fits in ``width`` characters; columns of detail 0 are there even if they do not."""
    table = readable(table)
    columns, text = [column for column in table.columns if not column.within], cells(table)
    natural, kept = widths(text), list(range(len(columns)))
    if _total(natural, kept) <= width:
        return Fitted(tuple(columns), text)
    least = _floors(columns, text, natural, 0)
    while _total(least, kept) > width and any(columns[place].detail for place in kept):
        detail = max(columns[place].detail for place in kept)
        kept.remove([place for place in kept if columns[place].detail == detail][-1])
    left_out = [column.title for place, column in enumerate(columns) if place not in kept]
    alike: dict[str, str] = {}
    if _total(least, kept) > width:
        same = [place for place in kept if columns[place].key in _ALIKE and len(set(text.columns[place])) == 1]
        if len(same) < len(kept):
            alike = {columns[place].title: text.columns[place][0] for place in same}
            kept = [place for place in kept if place not in same]
    if _total(least, kept) > width:
        bare = _without_spreads(text)
        left_out += [SPREADS] if bare != text else []
        text, natural = bare, widths(bare)
        least = _floors(columns, text, natural, 1)
    chosen, names = _with_room(columns, text, kept, (natural, least), width)
    return Fitted(tuple(columns[place] for place in kept), chosen, tuple(left_out), names, alike)


def _with_room(
    columns: Sequence[Column[Any]],
    text: Cells,
    kept: Sequence[int],
    sizes: tuple[Sequence[int], Sequence[int]],
    width: int,
) -> tuple[Cells, dict[str, str]]:
    """Return the cells of columns, with names no shorter than necessary, and the full names of the shortened ones.

    ``sizes`` are the widths of columns with full names, and their least widths.
    """
    names: dict[str, str] = {}
    (natural, least), texts = sizes, list(text.columns)
    slack = width - _total(least, kept)
    for place in sorted(kept, key=lambda place: _FLOORS.get(columns[place].key) != _OF_SCHEMES):  # they get room first
        given = max(0, min(natural[place] - least[place], slack))
        slack -= given
        if least[place] + given < natural[place]:
            texts[place], found = _shortened(texts[place], least[place] + given)
            names |= found
    headings, numeric = tuple(text.headings[place] for place in kept), tuple(text.numeric[place] for place in kept)
    return Cells(headings, numeric, tuple(texts[place] for place in kept)), names


def _total(sizes: Sequence[int], kept: Sequence[int]) -> int:
    """Return the width of a table: a space in front, and gaps between its columns."""
    return 1 + sum(sizes[place] + _GAP for place in kept)


def _floors(columns: Sequence[Column[Any]], text: Cells, natural: Sequence[int], step: int) -> list[int]:
    """Return the least widths of columns; none is narrower than its heading."""
    found = list(natural)
    for place, (column, heading, texts) in enumerate(zip(columns, text.headings, text.columns, strict=True)):
        if column.key in _FLOORS and natural[place] > (
            least := max(_FLOORS[column.key][step], _heading_width(heading))
        ):
            found[place] = max(least, max(map(cell_len, _short_names(texts, least).values())))
    return found


def _without_spreads(text: Cells) -> Cells:
    bare = [
        [each.partition(PLUS_MINUS)[0] for each in column] if is_number else column
        for column, is_number in zip(text.columns, text.numeric, strict=True)
    ]
    return replace(text, columns=tuple(bare))


def _shortened(texts: Sequence[str], width: int) -> tuple[list[str], dict[str, str]]:
    """Return texts of this width, and the full text of each shortened one."""
    short = _short_names(texts, width)
    return [short[each] for each in texts], {cut: name for name, cut in short.items() if cut != name}


_SHARES = (0.5, 0.25, 0.75, 0.1)  # shares of a shortened name before the gap


def _short_names(texts: Sequence[str], width: int) -> dict[str, str]:
    """Cut names that are too wide in the middle; cut elsewhere, or less, if two of them would look the same."""
    names = dict.fromkeys(texts)
    while True:
        for share in _SHARES:
            short = {name: _cut(name, width, share) for name in names}
            if len(set(short.values())) == len(short):
                return short
        width += 1


def _cut(name: str, width: int, share: float) -> str:
    if cell_len(name) <= width:
        return name
    start = max(1, round(share * (width - 1)))
    front = name[:start]
    if parts := _PARTS.findall(front):  # whole parts of a plan or a composition
        front = front[: front.rindex(parts[-1]) + len(parts[-1])]
    end = width - 1 - len(front)
    back = name[-end:] if end else ""
    if of_back := _PARTS.findall(back):
        back = back[back.index(of_back[0]) :]
    elif parts:
        back = ""
    return f"{front}…{back}"


_PARTS = re.compile(r", |\+")
"""Between two parts of a name."""


def widths(text: Cells) -> list[int]:
    """Return the width of each column: the longest cell, or the longest word of its heading."""
    return [
        max(_heading_width(heading), *map(size(texts), texts)) if texts else _heading_width(heading)
        for heading, texts in zip(text.headings, text.columns, strict=True)
    ]


def size(texts: Sequence[str]) -> Callable[[str], int]:
    """Return a function that counts the terminal cells of each of these texts."""
    letters = "".join(texts)
    return len if letters.isascii() or all(cell_len(letter) == 1 for letter in set(letters)) else cell_len


def wrapped(heading: str, width: int) -> list[str]:
    """Return the lines of a heading; an arrow stays with the word before it."""
    return textwrap.wrap(unbroken(heading), width)


def _heading_width(heading: str) -> int:
    return max(map(cell_len, unbroken(heading).split(" ")))
