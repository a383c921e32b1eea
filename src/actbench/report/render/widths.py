"""Fits a table into a width: it shortens long names in the middle, then leaves out columns, then spreads."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len

from actbench.report.render.formats import PLUS_MINUS, Cells, cells, framed, unbroken
from actbench.report.sentences import SAME
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
        text: The cells of the shown columns.
        left_out: Titles of what is not shown.
        names: The full name of each shortened name.
        constants: Values that all rows share, by the titles of their columns, which are not shown.
    """

    text: Cells
    left_out: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Lines below the table."""
        lines = [f"{short} is {name}." for short, name in self.names.items()]
        if self.constants:
            lines.append(f"{SAME}: {', '.join(f'{title.lower()} {value}' for title, value in self.constants.items())}.")
        if self.left_out:
            lines.append(f"Hidden for lack of space: {', '.join(self.left_out)} (widen the window, or --columns).")
        return lines


def fitted(table: Table, width: int) -> Fitted:
    """Return as much of a table as fits in ``width`` characters; columns of detail 0 stay, but those that yield."""
    text = cells(table)
    kept, natural = text.columns, widths(text)
    if _total(natural, kept) <= width:
        return Fitted(text)
    least = _floors(text, natural, 0)
    while _total(least, kept) > width and (detail := max(column.detail for column in kept)):
        kept = _without_last(kept, lambda column: column.detail == detail)
    left_out = [column.title for column in text.columns if column not in kept]
    constants: dict[str, str] = {}
    if _total(least, kept) > width:
        same = [column for column in kept if column.key in _ALIKE and len(set(text.frame[column.key])) == 1]
        if len(same) < len(kept):
            constants = {column.title: text.frame[column.key].iloc[0] for column in same}
            kept = tuple(column for column in kept if column not in same)
    if _total(least, kept) > width:
        bare = _without_spreads(text)
        left_out += [] if bare.frame.equals(text.frame) else [SPREADS]
        text, natural = bare, widths(bare)
        least = _floors(text, natural, 1)
    while _total(least, kept) > width and any(column.yields for column in kept):
        before, kept = kept, _without_last(kept, lambda column: column.yields)
        left_out += [column.title for column in before if column not in kept]
    names: dict[str, str] = {}
    texts = {column.key: text.frame[column.key] for column in kept}
    slack = width - _total(least, kept)
    for column in sorted(kept, key=lambda column: _FLOORS.get(column.key) != _OF_SCHEMES):  # they get room first
        key = column.key
        room = max(0, min(natural[key] - least[key], slack))
        slack -= room
        if least[key] + room < natural[key]:
            short = _short_names(texts[key], least[key] + room)
            texts[key] = [short[text] for text in texts[key]]
            names |= {cut: name for name, cut in short.items() if cut != name}
    return Fitted(Cells(kept, framed(texts, text.frame)), tuple(left_out), names, constants)


def _without_last(kept: tuple[Column[Any], ...], goes: Callable[[Column[Any]], bool]) -> tuple[Column[Any], ...]:
    last = max(place for place, column in enumerate(kept) if goes(column))
    return (*kept[:last], *kept[last + 1 :])


def _total(sizes: Mapping[str, int], kept: Sequence[Column[Any]]) -> int:
    """Return the width of a table: a space in front, and gaps between its columns."""
    return 1 + sum(sizes[column.key] + _GAP for column in kept)


def _floors(text: Cells, natural: Mapping[str, int], step: int) -> dict[str, int]:
    """Return the least widths of columns; none is narrower than its heading."""
    found = dict(natural)
    for column, heading in zip(text.columns, text.headings, strict=True):
        least = max(_FLOORS.get(column.key, _OF_SCHEMES)[step], _heading_width(heading))
        if column.key in _FLOORS and natural[column.key] > least:
            found[column.key] = max(least, *map(cell_len, _short_names(text.frame[column.key], least).values()))
    return found


def _without_spreads(text: Cells) -> Cells:
    bare = {
        column.key: [each.partition(PLUS_MINUS)[0] for each in text.frame[column.key]]
        if is_number
        else text.frame[column.key]
        for column, is_number in zip(text.columns, text.numeric, strict=True)
    }
    return Cells(text.columns, framed(bare, text.frame))


_SHARES = (0.5, 0.25, 0.75, 0.1)  # shares of a shortened name before the gap


def _short_names(texts: Iterable[str], width: int) -> dict[str, str]:
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


def widths(text: Cells) -> dict[str, int]:
    """Return the width of each column by key: the longest cell, or the longest word of its heading."""
    return {
        key: max([_heading_width(heading), *map(cells_in, texts)])
        for heading, (key, texts) in zip(text.headings, text.texts.items(), strict=True)
    }


def cells_in(text: str) -> int:
    """Return the cells of a terminal that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


def wrapped(heading: str, width: int) -> list[str]:
    """Return the lines of a heading; an arrow stays with the word before it."""
    return textwrap.wrap(unbroken(heading), width)


def _heading_width(heading: str) -> int:
    return max(map(cell_len, unbroken(heading).split(" ")))
