"""The cases of two results files side by side, with means over the seeds that both files have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from actbench.model.measured import MeasuredRecord, Measurement
from actbench.report.tables.entries import Entry, join


@dataclass(frozen=True, slots=True)
class Pair:
    """The entries of one case in two files; None if a file lacks it."""

    before: Entry | None
    after: Entry | None

    @property
    def either(self) -> Entry:
        """The entry of the second file, or else of the first."""
        entry = self.after or self.before
        assert entry is not None
        return entry


def pairs_of(before: Sequence[MeasuredRecord], after: Sequence[MeasuredRecord], several: bool) -> list[Pair]:
    """Return a pair for each case of either set, those of the first set first.

    With ``several`` the machine is part of what a case is. A mean is over the seeds that both sets measured; others are
    entries of their own.
    """

    def identity(entry: Entry) -> Hashable:
        return _identity(entry.record, several), entry.seeded.seeds

    first = {identity(entry): entry for entry in join(before, part=_measured_in(after, several))}
    second = {identity(entry): entry for entry in join(after, part=_measured_in(before, several))}
    added = (Pair(None, entry) for key, entry in second.items() if key not in first)
    return [*(Pair(entry, second.get(key)) for key, entry in first.items()), *added]


def _measured_in(others: Sequence[MeasuredRecord], several: bool) -> Callable[[MeasuredRecord], Hashable]:
    """Return a function that tells whether a set has measured the case of a record.

    A case that failed there is a value of its own, so that no mean hides the seed that failed.
    """
    measured = {_identity(record, several): isinstance(record.outcome, Measurement) for record in others}

    def part(record: MeasuredRecord) -> Hashable:
        case = _identity(record, several)
        return case if measured.get(case) is False else case in measured

    return part


def _identity(record: MeasuredRecord, several: bool) -> tuple[Hashable, str | None]:
    return record.case, record.machine.name if several else None
