"""A column of a table: its key, title, unit and direction, and how to compute it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from actbench.results.tables.values import Unit, Value

Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column of a table of items.

    Attributes:
        key: Name in CSV and data frames; amounts carry their base unit in it.
        title: Name in front of people.
        unit: ``share`` is a part of 1, ``change`` one with a sign, ``ratio`` a factor, ``reduction`` one of
            which 1,000 is as good as all, ``rate`` samples a second.
        compute: From an item to its value.
        better: Which direction is an improvement, where one is.
        spread_of: Key of the column whose plus-minus this one is.
        estimate_of: Key of the column in whose empty cells this one stands, marked ``est.``; a file has both.
        detail: Where a terminal is narrow, columns of the highest detail are left out first; those of 0 never.
        quiet: Whether only CSV has it, unless it is asked for.
        short: What ``--columns`` calls it, where that is not its title.
    """

    key: str
    title: str
    unit: Unit
    compute: Callable[[Item], Value]
    better: Literal["lower", "higher"] | None = None
    spread_of: str | None = None
    estimate_of: str | None = None
    detail: int = 0
    quiet: bool = False
    short: str = ""

    @property
    def within(self) -> str | None:
        """Key of the column in whose cells people find this one; None for one of its own."""
        return self.spread_of or self.estimate_of

    @property
    def name(self) -> str:
        """What ``--columns`` calls it."""
        return self.short or re.sub(r"[^a-z0-9]+", "-", self.title.lower().replace("/s", " per second"))
