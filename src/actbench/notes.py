"""What stands below a table of results: settings that all rows share, where they were measured, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from actbench.columns import RESULTS, Column
from actbench.entries import Entry
from actbench.records import Failure, Record
from actbench.values import write

_PUBLISHED_UNITS = {column.key: column.unit for column in RESULTS}


def notes_of(entries: Sequence[Entry], constant: Sequence[Column[Entry]]) -> tuple[str, ...]:
    """Return the notes of a table.

    Args:
        entries: The rows.
        constant: The settings that are the same in every row of a model.
    """
    records = [entry.record for entry in entries]
    lines = [*_settings(entries, constant), *map(_machine, records), *_published(records)]
    lines += [_failure(record) for record in records if isinstance(record.outcome, Failure)]
    lines += _warnings(records)
    if any(record.versions.dirty for record in records):
        lines.append("Rows marked uncommitted were measured with changes that no commit holds.")
    return tuple(dict.fromkeys(lines))


def _settings(entries: Sequence[Entry], constant: Sequence[Column[Entry]]) -> Iterable[str]:
    """Tell the settings that all rows share, then for each model those that its rows share."""
    common = [column for column in constant if len({column.compute(entry) for entry in entries}) == 1]
    yield from _told("All rows", entries[:1], common)
    first_of_model = {entry.record.case.model: entry for entry in reversed(entries)}
    for model, entry in sorted(first_of_model.items()):
        yield from _told(model, [entry], [column for column in constant if column not in common])


def _told(whose: str, entries: Sequence[Entry], columns: Sequence[Column[Entry]]) -> Iterable[str]:
    values = [(column, column.compute(entry)) for entry in entries for column in columns]
    written = [f"{column.title.lower()} {write(value, column.unit)}" for column, value in values if value is not None]
    if written:
        yield f"{whose}: {', '.join(written)}."


def _machine(record: Record) -> str:
    machine, versions = record.machine, record.versions
    device = machine.gpu or f"{machine.processor}, {machine.cores} cores"
    commit = f", commit {versions.commit[:7]}" if versions.commit else ""
    return f"Measured on {machine.name} ({device}) with actbench {versions.actbench}{commit}, torch {versions.torch}."


def _published(records: Sequence[Record]) -> Iterable[str]:
    for record in records:
        for item in record.published:
            value = write(item.value, _PUBLISHED_UNITS[f"published_{item.quantity}"])
            quantity = item.quantity.replace("_", " ")
            yield f"Published for {record.case.scheme}: {quantity} {value} ({item.setting}; {item.source})."


def _failure(record: Record) -> str:
    assert isinstance(record.outcome, Failure)
    return f"{_row(record)}: {record.outcome.reason}: {' '.join(record.outcome.message.split())}"


def _warnings(records: Sequence[Record]) -> Iterable[str]:
    counts = Counter(text for record in records for text in getattr(record.outcome, "warnings", ()))
    for text, count in counts.items():
        yield f"Warning: {text}" if count == len(records) else f"Warning in {count} of {len(records)} rows: {text}"


def _row(record: Record) -> str:
    return f"{record.case.model}, {record.case.scheme}, batch {record.case.batch_size} ({record.case.meter})"
