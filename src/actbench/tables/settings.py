"""Settings of cases: a column where rows of a model differ in them, a note where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from actbench.tables.columns import METER, SETTINGS, Column
from actbench.tables.entries import Entry
from actbench.tables.rows import blocks
from actbench.tables.values import Value, write

Group = tuple[str, str]
"""A model and a meter."""

_ALL = "All rows"


class Settings:
    """The settings of a table's rows.

    Args:
        entries: The rows.

    Attributes:
        varying: Columns in which rows of one model and meter differ.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        found = constant(entries, (METER, *SETTINGS))
        self.varying = tuple(column for column in SETTINGS if found[column] is None)
        self._constant = {column: values for column, values in found.items() if values is not None}
        if len(set(self._constant[METER].values())) > 1:
            del self._constant[METER]

    def told(self) -> list[str]:
        """Tell each setting of the most rows that share it: all, those of a model, or those of a model on a meter."""
        told: dict[str, list[str]] = {}
        for column, values in self._constant.items():
            for whose, value in _largest(values):
                if value is not None:
                    told.setdefault(whose, []).append(f"{column.title.lower()} {write(value, column.unit)}")
        return [
            f"{whose}: {', '.join(told[whose])}." for whose in sorted(told, key=lambda whose: (whose != _ALL, whose))
        ]


def constant(
    entries: Sequence[Entry], columns: Sequence[Column[Entry]]
) -> dict[Column[Entry], dict[Group, Value] | None]:
    """Return for each column the one value that the rows of each model on each meter have; None where some differ."""
    groups: set[Group] = set()
    found: dict[Column[Entry], set[tuple[Group, Value]]] = {column: set() for column in columns}
    for block in blocks(entries):
        theirs = [(entry.record.case.model, entry.record.case.meter) for entry in block]
        groups.update(theirs)
        for column, values in found.items():
            values.update(zip(theirs, map(column.compute, block), strict=True))
    return {column: dict(values) if len(values) == len(groups) else None for column, values in found.items()}


def _largest(values: Mapping[Group, Value]) -> Iterator[tuple[str, Value]]:
    """Yield the value of all, or else those of the models, or else those of the models on each meter."""
    if len(set(values.values())) == 1:
        yield _ALL, next(iter(values.values()))
        return
    models = {model for model, _ in values}
    if len({(model, value) for (model, _), value in values.items()}) == len(models):
        yield from {model: value for (model, _), value in values.items()}.items()
        return
    yield from ((f"{model} ({meter})", value) for (model, meter), value in values.items())
