"""What stands below a table of results: settings that all rows share, where they were measured, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from actbench.records import Case, Failure, Published, Record
from actbench.tables.columns import RESULTS, Column
from actbench.tables.entries import Entry
from actbench.tables.values import Unit, Value, write

_PUBLISHED_UNITS: dict[str, Unit] = {"published_accuracy": "share", **{column.key: column.unit for column in RESULTS}}


def notes_of(entries: Sequence[Entry], constant: Sequence[Column[Entry]]) -> tuple[str, ...]:
    """Return the notes of a table.

    Args:
        entries: The rows.
        constant: The settings of which a model has one value on each meter.
    """
    records = [entry.record for entry in entries]
    lines = [*_settings(entries, constant), *map(_machine, records), *_published(records)]
    lines += [_failure(record) for record in records if isinstance(record.outcome, Failure)]
    lines += _warnings(records)
    if any(record.versions.dirty for record in records):
        lines.append("Rows marked uncommitted were measured with changes that no commit holds.")
    return tuple(dict.fromkeys(lines))


_ALL = "All rows"
_OWNERS: tuple[Callable[[Case], str], ...] = (
    lambda case: _ALL,
    lambda case: case.model,
    lambda case: f"{case.model} ({case.meter})",
)


def _settings(entries: Sequence[Entry], constant: Sequence[Column[Entry]]) -> list[str]:
    """Tell each setting of the largest groups of rows that share it: all, those of a model, of a model on a meter."""
    told: dict[str, list[str]] = {}
    for column in constant:
        shared = next(values for owner in _OWNERS if (values := _shared(column, entries, owner)) is not None)
        for whose, value in shared.items():
            if value is not None:
                told.setdefault(whose, []).append(f"{column.title.lower()} {write(value, column.unit)}")
    return [f"{whose}: {', '.join(told[whose])}." for whose in sorted(told, key=lambda whose: (whose != _ALL, whose))]


def _shared(column: Column[Entry], entries: Sequence[Entry], owner: Callable[[Case], str]) -> dict[str, Value] | None:
    """Return the one value that the rows of each owner have, or None when those of some owner differ."""
    values: dict[str, Value] = {}
    for entry in entries:
        value = column.compute(entry)
        if values.setdefault(owner(entry.record.case), value) != value:
            return None
    return values


def _machine(record: Record) -> str:
    machine, versions = record.machine, record.versions
    device = machine.gpu or f"{machine.processor}, {machine.cores} cores"
    commit = f", commit {versions.commit[:7]}" if versions.commit else ""
    return f"Measured on {machine.name} ({device}) with actbench {versions.actbench}{commit}, torch {versions.torch}."


def _published(records: Sequence[Record]) -> Iterable[str]:
    for record in records:
        for item in record.published:
            yield published_note(record.case.scheme, item)


def published_note(scheme: str, item: Published) -> str:
    """Return the sentence about a figure that was published for a scheme."""
    value = write(item.value, _PUBLISHED_UNITS[f"published_{item.quantity}"])
    quantity = item.quantity.replace("_", " ")
    return f"Published for {scheme}: {quantity} {value} ({item.setting}; {item.source})."


def _failure(record: Record) -> str:
    assert isinstance(record.outcome, Failure)
    return f"{_row(record)}: {record.outcome.reason}: {' '.join(record.outcome.message.split())}"


def _warnings(records: Sequence[Record]) -> Iterable[str]:
    counts = Counter(text for record in records for text in getattr(record.outcome, "warnings", ()))
    for text, count in counts.items():
        yield f"Warning: {text}" if count == len(records) else f"Warning in {count} of {len(records)} rows: {text}"


def _row(record: Record) -> str:
    return f"{record.case.model}, {record.case.scheme}, batch {record.case.batch_size} ({record.case.meter})"
