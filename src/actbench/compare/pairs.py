"""Two results files side by side: what became better or worse, and whether that breaks a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actbench.compare.limits import QUANTITIES, Limit
from actbench.records import Record
from actbench.tables import Table, fill, varying_settings
from actbench.tables.columns import BATCH, MACHINE, METER, MODEL, SCHEME, STATUS, Column, change
from actbench.tables.entries import Entry, join
from actbench.tables.values import Value, write

_NOT_HERE = "not in this file"


@dataclass(frozen=True)
class Pair:
    """One case in two files; None where a file does not hold it."""

    before: Entry | None
    after: Entry | None

    @property
    def either(self) -> Entry:
        """The entry of the second file, or of the first where the second has none."""
        entry = self.after or self.before
        assert entry is not None
        return entry


@dataclass(frozen=True)
class Comparison:
    """What became of the cases of two files.

    Attributes:
        table: One row for each case of either file.
        violations: One sentence for each limit that a case breaks; empty when all hold.
    """

    table: Table
    violations: tuple[str, ...]


def compare(before: Sequence[Record], after: Sequence[Record], limits: Sequence[Limit] = ()) -> Comparison:
    """Compare two sets of records case by case; the machines may differ, which the notes then say.

    Where a set is of several machines, each is compared with itself, and a column names it.

    A case that was measured before and fails now breaks every limit, and so does a limit that no case could be held to:
    a check of nothing must not pass.
    """
    several = any(len({record.machine.name for record in records}) > 1 for records in (before, after))
    pairs = _pairs(before, after, several)
    entries = [pair.either for pair in pairs]
    machine = (MACHINE,) if several else ()
    identity = [_of_either(column) for column in (*machine, MODEL, *varying_settings(entries), BATCH, SCHEME, METER)]
    quantities = [column for quantity in QUANTITIES.values() for column in _three(quantity)]
    status = [_side(STATUS, "before", "A"), _side(STATUS, "after", "B")]
    table = fill("B against A", [*identity, *quantities, *status], pairs, _notes(before, after))
    return Comparison(table, tuple(line for limit in limits for line in _violations(limit, pairs, several)))


def _pairs(before: Sequence[Record], after: Sequence[Record], several: bool) -> list[Pair]:
    def identity(record: Record) -> tuple[str, str]:
        return record.case.key(), record.machine.name if several else ""

    first = {identity(entry.record): entry for entry in join(before)}
    second = {identity(entry.record): entry for entry in join(after)}
    return [Pair(first.get(key), second.get(key)) for key in first | second]


def _of_either(column: Column[Entry]) -> Column[Pair]:
    return Column(column.key, column.title, column.unit, lambda pair: column.compute(pair.either))


def _side(column: Column[Entry], side: str, letter: str) -> Column[Pair]:
    def compute(pair: Pair) -> Value:
        entry = getattr(pair, side)
        if entry is None:
            return _NOT_HERE if column is STATUS else None
        return column.compute(entry)

    return Column(f"{column.key}_{side}", f"{column.title} {letter}", column.unit, compute)


def _three(column: Column[Entry]) -> tuple[Column[Pair], ...]:
    """Return the columns of a quantity in the first file, in the second, and of its change."""
    return (
        _side(column, "before", "A"),
        _side(column, "after", "B"),
        Column(
            f"{column.key.removesuffix('_bytes')}_change",
            f"{column.title} change",
            "change",
            lambda pair: change(_value(column, pair.before), _value(column, pair.after)),
            better=column.better,
        ),
    )


def _value(column: Column[Entry], entry: Entry | None) -> float | None:
    value = column.compute(entry) if entry is not None else None
    return value if isinstance(value, int | float) else None


def _violations(limit: Limit, pairs: Sequence[Pair], several: bool) -> Iterator[str]:
    column = QUANTITIES[limit.quantity]
    checked = 0
    for pair in pairs:
        case, here = pair.either.record.case, f", {pair.either.record.machine.name}" if several else ""
        place = f"{limit.text}: {case.model}, {case.scheme}, batch {case.batch_size} ({case.meter}{here})"
        value, earlier = _value(column, pair.after), _value(column, pair.before)
        if value is None and earlier is not None:
            why = "it is not in the second file" if pair.after is None else STATUS.compute(pair.after) or "no value"
            yield f"{place}: was measured before and is not now ({why})"
            checked += 1
        broken = limit.broken_by(earlier, value) if value is not None else None
        checked += broken is not None
        if broken:
            yield f"{place}: {_told(column, earlier)} before, {_told(column, value)} now"
    if not checked:
        yield f"{limit.text}: no case of the two files could be checked"


def _told(column: Column[Entry], value: float | None) -> str:
    return write(value, column.unit) if value is not None else "unknown"


def _notes(before: Sequence[Record], after: Sequence[Record]) -> list[str]:
    def machines(records: Sequence[Record]) -> str:
        names = {f"{record.machine.name} ({record.machine.gpu or record.machine.processor})" for record in records}
        return ", ".join(sorted(names)) or "no machine"

    first, second = machines(before), machines(after)
    return [] if first == second else [f"A was measured on {first}, B on {second}."]
