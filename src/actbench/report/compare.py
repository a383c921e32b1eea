"""Two results files side by side: what got better or worse, and whether it breaks a limit of ``--fail-on``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from actbench.errors import UsageError
from actbench.model.data import Data
from actbench.model.measured import MeasuredRecord
from actbench.model.records import SCHEMA_VERSION, Case, SchemaVersion, named
from actbench.report.pairs import Pair, pairs_of
from actbench.report.sentences import rows_of
from actbench.report.tables import Table, fill, varying_settings
from actbench.report.tables.columns import BATCH, CONTENT, MACHINE, METER, MODEL, RESULTS, SCHEME, STATUS
from actbench.report.tables.entries import Entry
from actbench.report.tables.table import with_seeds
from actbench.report.tables.values import Column, Unit, Value, change, write
from actbench.units import parse_bytes

QUANTITIES: dict[str, Column[Entry]] = {
    name: next(column for column in RESULTS if column.key == key)
    for name, key in {
        "peak": "peak_bytes",
        "activations": "activation_bytes",
        "throughput": "samples_per_second",
        "largest_batch": "largest_batch",
    }.items()
}
"""The columns that can be compared and limited, by their names in ``--fail-on``."""


@dataclass(frozen=True)
class Limit:
    """A bound on one quantity of :data:`QUANTITIES`; ``text`` is what the user wrote.

    ``amount`` is the share by which the quantity may get worse (kind ``worse``), or a bound in base units for its value
    (kinds ``>`` and ``<``).
    """

    text: str
    quantity: str
    kind: Literal["worse", ">", "<"]
    amount: float

    def broken_by(self, before: float | None, after: float) -> bool | None:
        """Whether a change breaks the limit; None without an earlier value to compare with."""
        if self.kind != "worse":
            return after > self.amount if self.kind == ">" else after < self.amount
        if before is None:
            return None
        lower_is_better = QUANTITIES[self.quantity].better == "lower"
        if before == 0:
            return lower_is_better and after > 0
        grown = change(before, after) or 0.0
        worse = grown if lower_is_better else -grown
        return worse > self.amount and not math.isclose(worse, self.amount, abs_tol=1e-12)  # 1.05 - 1 is above 0.05


def parse_limit(text: str) -> Limit:
    """Read ``peak:5%`` (more than 5 % worse fails), ``largest_batch:0%``, ``peak:>8GiB`` or ``throughput:<90``.

    Raises:
        UsageError: The text does not follow this grammar.
    """
    quantity, colon, bound = (part.strip() for part in text.partition(":"))
    if not colon or quantity not in QUANTITIES:
        raise UsageError(f"--fail-on {text!r}: write QUANTITY:BOUND, with a quantity of {', '.join(QUANTITIES)}")
    if bound[:1] in ("<", ">"):
        amount = _amount(bound[1:].strip(), QUANTITIES[quantity].unit, text)
        return Limit(text, quantity, ">" if bound[0] == ">" else "<", amount)
    if not bound.endswith("%"):
        raise UsageError(f"--fail-on {text!r}: {bound!r} is neither a share such as 5% nor a bound such as >8GiB")
    return Limit(text, quantity, "worse", _number(bound[:-1].strip(), text) / 100)


def _amount(bound: str, unit: Unit, text: str) -> float:
    if unit != "bytes":
        return _number(bound, text)
    try:
        return parse_bytes(bound)
    except UsageError as error:
        raise UsageError(f"--fail-on {text!r}: {error}") from None


def _number(bound: str, text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", bound) or not math.isfinite(float(bound)):
        raise UsageError(f"--fail-on {text!r}: {bound!r} is not a number of 0 or more")
    return float(bound)


_DETAILS = {"peak": 1, "activations": 3, "throughput": 2, "largest_batch": 2}
"""Detail of the columns with the two values of a quantity; the column of its change has one less."""

_NOT_HERE = "not in this file"


@dataclass(frozen=True)
class Check:
    """A case held to a limit.

    Attributes:
        limit: The limit, as the user wrote it.
        case: The name of the case, with the settings in which cases differ; empty if the limit could be checked
            against no case.
        broken: How the case breaks the limit; empty if it does not.
        is_new: Whether the limit says nothing of the case, as the first file has no value to compare with.
    """

    limit: str
    case: str
    broken: str = ""
    is_new: bool = False


@dataclass(frozen=True)
class Comparison:
    """A table with a row for each case of either file, and the checks of cases against limits."""

    table: Table
    checks: tuple[Check, ...]
    records: tuple[MeasuredRecord, ...] = ()

    @property
    def violations(self) -> tuple[str, ...]:
        """A sentence for each limit that a case breaks."""
        broken = (check for check in self.checks if check.broken)
        return tuple(": ".join(filter(None, (check.limit, check.case, check.broken))) for check in broken)

    def as_json(self) -> str:
        """Return the rows, with values under the keys of CSV, and the sentences about broken limits."""
        rows = tuple(
            ComparedCase(case=record.case, machine=record.machine.name, values=dict(row))
            for record, row in zip(self.records, self.table.rows, strict=True)
        )
        written = WrittenComparison(rows=rows, violations=self.violations, notes=self.table.notes)
        return written.model_dump_json(indent=2) + "\n"


class ComparedCase(Data):
    """A row of a comparison as JSON: ``values`` are in base units, or null if a file has none."""

    case: Case
    machine: str
    values: dict[str, Value]


class WrittenComparison(Data):
    """A comparison as ``compare --export-json`` writes it."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    rows: tuple[ComparedCase, ...]
    violations: tuple[str, ...]
    notes: tuple[str, ...]


def compare(
    before: Sequence[MeasuredRecord], after: Sequence[MeasuredRecord], limits: Sequence[Limit] = ()
) -> Comparison:
    """Compare two sets of records case by case; each of several machines is compared with itself.

    Means are over the seeds that both sets measured; other seeds are rows of their own. A case that was measured before
    and fails now breaks every limit. A limit that no case could be checked against is broken too: a check of nothing
    must not pass.
    """
    several = any(len({record.machine.name for record in records}) > 1 for records in (before, after))
    pairs = pairs_of(before, after, several)
    entries = [pair.either for pair in pairs]
    machine = (MACHINE,) if several else ()
    settings = varying_settings(entries)
    identity = [_of_either(column) for column in (*machine, MODEL, *settings, BATCH, SCHEME, METER)]
    details = {**_DETAILS, **{limit.quantity: 1 for limit in limits}}  # so that what is asked for is never hidden
    quantities = [column for name, quantity in QUANTITIES.items() for column in _three(quantity, details[name])]
    status = [_side(STATUS, "before", "A"), _side(STATUS, "after", "B")]
    table = fill("B against A", [*identity, *quantities, *status], pairs, _notes(before, after))
    told = [column for column in settings if column is not CONTENT]  # a name is the same from commit to commit
    names = [_name(entry, told, several) for entry in entries]
    checks = tuple(check for limit in limits for check in _checks(limit, pairs, names))
    return Comparison(table, checks, tuple(entry.record for entry in entries))


def _of_either(column: Column[Entry]) -> Column[Pair]:
    return Column(column.key, column.title, column.unit, lambda pair: column.compute(pair.either))


def _sides(column: Column[Entry], side: str, letter: str, detail: int) -> Iterator[Column[Pair]]:
    """Yield the column of a quantity in one file, and that of its deviation over seeds."""
    value, *spreads = with_seeds(column)
    yield (shown := _side(value, side, letter, detail))
    for each in spreads:
        yield replace(_side(each, side, letter), key=f"{shown.key}_spread", title=each.title, spread_of=shown.key)


def _side(column: Column[Entry], side: str, letter: str, detail: int = 0) -> Column[Pair]:
    def compute(pair: Pair) -> Value:
        entry = getattr(pair, side)
        if entry is None:
            return _NOT_HERE if column is STATUS else None
        return column.compute(entry)

    return Column(f"{column.key}_{side}", f"{column.title} {letter}", column.unit, compute, detail=detail)


def _three(column: Column[Entry], detail: int) -> tuple[Column[Pair], ...]:
    """Return three columns of a quantity: in the first file, in the second, and its change."""
    return (
        *_sides(column, "before", "A", detail),
        *_sides(column, "after", "B", detail),
        Column(
            f"{column.key.removesuffix('_bytes')}_change",
            f"{column.title} change",
            "change",
            lambda pair: change(_value(column, pair.before), _value(column, pair.after)),
            better=column.better,
            detail=detail - 1,
        ),
    )


def _value(column: Column[Entry], entry: Entry | None) -> float | None:
    value = column.compute(entry) if entry is not None else None
    return value if isinstance(value, int | float) else None


def _checks(limit: Limit, pairs: Sequence[Pair], names: Sequence[str]) -> Iterator[Check]:
    column = QUANTITIES[limit.quantity]
    checked = 0
    for pair, name in zip(pairs, names, strict=True):
        value, earlier = _value(column, pair.after), _value(column, pair.before)
        if value is None and earlier is None:
            continue
        checked += 1
        if value is None:
            now = None if pair.after is None else STATUS.compute(pair.after) or "no value"
            lacks = "missing from the second file" if now is None else f"has a value before, and now: {now}"
            yield Check(limit.text, name, lacks)
            continue
        broken = limit.broken_by(earlier, value)
        checked -= broken is None
        told = f"{_shown(column, earlier)} before, {_shown(column, value)} now" if broken else ""
        yield Check(limit.text, name, told, is_new=broken is None)
    if not checked:
        both = [entry for pair in pairs for entry in (pair.before, pair.after) if entry is not None]
        are_simulated = both and all(getattr(entry.record.case, "meter", "") == "simulated" for entry in both)
        why = "these rows are simulated, and estimates are not compared" if are_simulated else "no row has a value"
        yield Check(limit.text, "", f"cannot be checked: {why}")


def _name(entry: Entry, settings: Sequence[Column[Entry]], several: bool) -> str:
    """Return the name of a case, with its machine if there are several, and with some of its settings."""
    case = entry.record.case
    found = [(column, value) for column in settings if (value := column.compute(entry)) is not None]
    told = [f"{column.title.lower()} {write(value, column.unit)}" for column, value in found]
    machine = [entry.record.machine.name] if several else []
    return named(case.model, case.scheme, rows_of(case, entry.record.outcome), ", ".join([case.meter, *machine, *told]))


def _shown(column: Column[Entry], value: float | None) -> str:
    return write(value, column.unit) if value is not None else "unknown"


def _notes(before: Sequence[MeasuredRecord], after: Sequence[MeasuredRecord]) -> list[str]:
    def machines(records: Sequence[MeasuredRecord]) -> str:
        names = {f"{record.machine.name} ({record.machine.gpu or record.machine.processor})" for record in records}
        return ", ".join(sorted(names)) or "no machine"

    first, second = machines(before), machines(after)
    return [] if first == second else [f"A was measured on {first}, B on {second}."]
