"""Where the time of a simulated step goes, by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actbench.results.measured import OTHERS, EstimatedTime, MeasuredRecord, Measurement
from actbench.results.tables.columns import Column
from actbench.results.tables.table import Table, fill

DEAREST = 10
"""Most operators in a table."""

_REST, _ALL, _BESIDE = "(all others)", "step", ", beside the step"


@dataclass(frozen=True)
class _Operator:
    """An operator, with its seconds and calls under each scheme."""

    name: str
    seconds: Mapping[str, float]
    calls: Mapping[str, int]


def operator_tables(records: Sequence[MeasuredRecord]) -> list[Table]:
    """Return, for each simulated case, the operators that take most of the step's estimated time.

    Schemes of one case stand beside each other, and the rows add up to the step; below it stands what runs beside that.
    """
    cases: dict[str, list[tuple[MeasuredRecord, EstimatedTime]]] = {}
    for record in records:
        if isinstance(record.outcome, Measurement) and record.outcome.estimated:
            same = record.case.model_copy(update={"scheme": "exact"}).key()
            cases.setdefault(same, []).append((record, record.outcome.estimated))
    return [_operator_table(case) for case in cases.values()]


def _operator_table(found: Sequence[tuple[MeasuredRecord, EstimatedTime]]) -> Table:
    case = found[0][0].case
    times = {record.case.scheme: time for record, time in found}
    within = _by_operator(times, is_beside=False)
    others = [each for each in within if each.name == OTHERS]
    within = [each for each in within if each.name != OTHERS]
    rest = {scheme: sum(each.seconds.get(scheme, 0.0) for each in within[DEAREST:] + others) for scheme in times}
    rows = [
        *within[:DEAREST],
        _Operator(_REST, rest, {}),
        _Operator(_ALL, {scheme: time.step_seconds for scheme, time in times.items()}, {}),
        *(replace(each, name=f"{each.name}{_BESIDE}") for each in _by_operator(times, is_beside=True)),
    ]
    title = f"Where the time of a step of {case.model} goes, batch {case.batch_size}, {case.device_profile}, est."
    columns = [column for scheme in times for column in _of_scheme(scheme)]
    return fill(title, (Column("operator", "Operator", "text", lambda row: row.name), *columns), rows)


def _by_operator(times: Mapping[str, EstimatedTime], *, is_beside: bool) -> list[_Operator]:
    """Return the operators that run within the step, or beside it, the dearest first."""
    found = {
        scheme: {each.name: each for each in time.by_operator if each.is_beside == is_beside}
        for scheme, time in times.items()
    }
    operators = [
        _Operator(
            name,
            {scheme: each[name].seconds for scheme, each in found.items() if name in each},
            {scheme: each[name].calls for scheme, each in found.items() if name in each},
        )
        for name in dict.fromkeys(name for each in found.values() for name in each)
    ]
    return sorted(operators, key=lambda each: (-max(each.seconds.values()), each.name))


def _of_scheme(scheme: str) -> tuple[Column[_Operator], ...]:
    return (
        Column(f"{scheme}_seconds", scheme, "seconds", lambda row: row.seconds.get(scheme)),
        Column(f"{scheme}_calls", f"{scheme}, calls", "count", lambda row: row.calls.get(scheme), detail=1),
    )
