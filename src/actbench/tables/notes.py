"""What stands below a table of results: settings that all rows share, where they were measured, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from actbench.records import Failure, Published, Record
from actbench.tables.columns import RESULTS
from actbench.tables.entries import Entry
from actbench.tables.settings import Settings
from actbench.tables.values import Unit, write

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
