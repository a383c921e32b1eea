"""What stands below a table of results: settings that all rows share, where they were measured, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from actbench.results.measured import MeasuredRecord
from actbench.results.records import Failure, Published
from actbench.results.tables.columns import METER, RESULTS, SETTINGS, Column
from actbench.results.tables.entries import Entry
from actbench.results.tables.values import Unit, Value, blocks, write

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


_PUBLISHED_UNITS: dict[str, Unit] = {"published_accuracy": "share", **{column.key: column.unit for column in RESULTS}}


def notes_of(entries: Sequence[Entry], settings: Settings) -> tuple[str, ...]:
    """Return the notes of a table.

    Args:
        entries: The rows.
        settings: Theirs.
    """
    records = [entry.record for entry in entries]
    failed = (record for record in records if isinstance(record.outcome, Failure))
    lines = chain(
        settings.told(), map(_machine, records), _published(records), map(_failure, failed), _warnings(records)
    )
    notes = dict.fromkeys(lines)
    if any(record.versions.dirty for record in records):
        notes["Rows marked uncommitted were measured with changes that no commit holds."] = None
    return tuple(notes)


def _machine(record: MeasuredRecord) -> str:
    machine, versions = record.machine, record.versions
    device = machine.gpu or f"{machine.processor}, {machine.cores} cores"
    commit = f", commit {versions.commit[:7]}" if versions.commit else ""
    return f"Measured on {machine.name} ({device}) with actbench {versions.actbench}{commit}, torch {versions.torch}."


def _published(records: Sequence[MeasuredRecord]) -> Iterable[str]:
    for record in records:
        for item in record.published:
            yield published_note(record.case.scheme, item)


def published_note(scheme: str, item: Published) -> str:
    """Return the sentence about a figure that was published for a scheme."""
    value = write(item.value, _PUBLISHED_UNITS[f"published_{item.quantity}"])
    quantity = item.quantity.replace("_", " ")
    return f"Published for {scheme}: {quantity} {value} ({item.setting}; {item.source})."


def _failure(record: MeasuredRecord) -> str:
    assert isinstance(record.outcome, Failure)
    return f"{record.case.name}: {record.outcome.reason}: {' '.join(record.outcome.message.split())}"


def _warnings(records: Sequence[MeasuredRecord]) -> Iterable[str]:
    counts = Counter(text for record in records for text in getattr(record.outcome, "warnings", ()))
    for text, count in counts.items():
        yield f"Warning: {text}" if count == len(records) else f"Warning in {count} of {len(records)} rows: {text}"
