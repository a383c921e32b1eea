"""The columns that a user selects, by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from actbench.errors import UsageError
from actbench.results.tables.columns import BATCH, LABEL, MACHINE, METER, MODEL, RESULTS, SCHEME, Column
from actbench.results.tables.entries import Entry

IDENTITY: tuple[Column[Entry], ...] = (MACHINE, MODEL, BATCH, SCHEME, LABEL, METER)
"""Columns that distinguish rows, beside settings in which rows differ."""

CHOICES = {column.name: column for column in (*IDENTITY, *RESULTS) if not column.within}
"""The columns that a user can select, by name."""


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of columns in ``peak,saved,speed``.

    Raises:
        UsageError: There is no such column, or a name is repeated; the message has the closest names.
    """
    names = tuple(name.strip() for name in text.split(","))
    for place, name in enumerate(names):
        if name not in CHOICES:
            close = difflib.get_close_matches(name.lower(), CHOICES, n=3, cutoff=0.7)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(CHOICES)}"
            raise UsageError(f"there is no column {name!r}; {hint}")
        if name in names[:place]:
            raise UsageError(f"column {name!r} stands twice")
    return names


def selected(
    names: Sequence[str], identity: Sequence[Column[Entry]], results: Sequence[Column[Entry]]
) -> tuple[Column[Entry], ...]:
    """Return the columns of a table: those that distinguish rows, then the selected ones, in their order.

    Args:
        names: The selected columns. If any is in :data:`IDENTITY`, the table has no other column of these.
        identity: Columns that distinguish rows, with the settings in which rows differ.
        results: The other columns, if nothing is selected.
    """
    if not names:
        return (*identity, *results)
    asked = {name: replace(CHOICES[name], quiet=False, detail=0) for name in names}
    own, there = {column.name for column in IDENTITY}, {column.name for column in identity}
    if asked.keys() & own:
        shown = (*identity, *(column for column in IDENTITY if column.name not in there))
        identity = [column for column in shown if column.name not in own or column.name in asked]
    wanted = [column for name, column in asked.items() if CHOICES[name] not in IDENTITY]
    with_theirs = [[column, *(each for each in RESULTS if each.within == column.key)] for column in wanted]
    return (*identity, *(column for columns in with_theirs for column in columns))
