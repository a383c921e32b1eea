"""The parts of a page beside its tables: Vega-Lite charts in groups of comparable rows, and details of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actbench.results.plain import plain
from actbench.results.records import Failure, Record

Values = Sequence[Mapping[str, Any]]
"""The data of a chart: raw values in base units, with the values to draw and the texts to show."""


@dataclass(frozen=True)
class Picture:
    """One chart. ``spec`` is Vega-Lite with its data; names are only in the data, never in an expression."""

    title: str
    about: str
    spec: Mapping[str, Any]
    is_wide: bool = False


@dataclass(frozen=True)
class Group:
    """The charts of rows that can be compared, under a name for the reader to choose."""

    name: str
    pictures: tuple[Picture, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Details:
    """What the page shows when a reader opens a row of its first table, by heading."""

    texts: Mapping[str, str]
    is_estimated: bool = False


@dataclass(frozen=True)
class Beside:
    """What a page shows beside the tables; ``details`` belong to the rows of the first table, in their order."""

    groups: tuple[Group, ...] = ()
    details: tuple[Details, ...] = ()

    @property
    def has_charts(self) -> bool:
        """Whether there is anything to draw."""
        return any(group.pictures for group in self.groups)


MOST_GROUPS = 40
"""Most groups with charts on a page: a file of a few MB opens at once."""


def shown(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups for a page, those with the most charts first."""
    drawn = sorted((group for group in groups if group.pictures), key=lambda group: -len(group.pictures))
    if len(drawn) <= MOST_GROUPS:
        return tuple(drawn)
    left_out = f"{len(drawn) - MOST_GROUPS} more groups of rows have no charts here: make a report of fewer records."
    return tuple(Group(group.name, group.pictures, (*group.remarks, left_out)) for group in drawn[:MOST_GROUPS])


def texts_of(record: Record[Any, Any]) -> dict[str, str]:
    """Return the settings, command and machine of a record, by heading."""
    machine, versions, outcome = record.machine, record.versions, record.outcome
    device = f"{machine.gpu}, " if machine.gpu else ""
    commit = f" ({versions.commit[:12]}{', uncommitted changes' if versions.dirty else ''})" if versions.commit else ""
    numbers = versions.model_dump(exclude_none=True, exclude={"actbench", "commit", "dirty"})
    found = {
        "Command": record.command,
        "Settings": _settings(record.case.model_dump(exclude_none=True)),
        "Failure": f"{outcome.reason}: {outcome.message}" if isinstance(outcome, Failure) else "",
        "Warnings": "\n".join(getattr(outcome, "warnings", ())),
        "Machine": f"{machine.name}: {device}{machine.processor}, {machine.cores} cores, {machine.system}",
        "Versions": f"actbench {versions.actbench}{commit}, {', '.join(f'{k} {v}' for k, v in numbers.items())}",
        "Recorded": f"{record.recorded_at}, recipe {record.recipe}",
    }
    return {heading: plain(text) for heading, text in found.items() if text}


def _settings(case: dict[str, Any]) -> str:
    """Return the fields of a case that are not None or false, as text."""
    told = ((name.replace("_", " "), value) for name, value in case.items() if value is not False)
    return ", ".join(name if value is True else f"{name} {value}" for name, value in told)
