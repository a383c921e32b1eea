"""What a page shows beside its tables: charts as Vega-Lite, in groups of comparable rows, and details of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Values = Sequence[Mapping[str, Any]]
"""The data of a chart: raw values in base units, with what is drawn and written of them."""


@dataclass(frozen=True)
class Picture:
    """One chart. ``spec`` is Vega-Lite with its data; names stand in the data only, never in an expression."""

    title: str
    about: str
    spec: Mapping[str, Any]
    is_wide: bool = False


@dataclass(frozen=True)
class Group:
    """The charts of rows that can be compared, under the name that a reader chooses them by."""

    name: str
    pictures: tuple[Picture, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Details:
    """What the page tells of a row of its first table when it is opened, by heading."""

    texts: Mapping[str, str]
    is_estimated: bool = False


@dataclass(frozen=True)
class Beside:
    """What stands beside the tables; ``details`` are those of the rows of the first one, in their order."""

    groups: tuple[Group, ...] = ()
    details: tuple[Details, ...] = ()

    @property
    def has_charts(self) -> bool:
        """Whether there is anything to draw."""
        return any(group.pictures for group in self.groups)


MOST_GROUPS = 40
"""Groups whose charts a page holds: a file of a few MB that a browser opens at once."""


def shown(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups that a page holds, those with the most charts first."""
    drawn = sorted((group for group in groups if group.pictures), key=lambda group: -len(group.pictures))
    if len(drawn) <= MOST_GROUPS:
        return tuple(drawn)
    left_out = f"{len(drawn) - MOST_GROUPS} more groups of rows have no charts here: make a report of fewer records."
    return tuple(Group(group.name, group.pictures, (*group.remarks, left_out)) for group in drawn[:MOST_GROUPS])
