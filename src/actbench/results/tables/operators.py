"""Where the time of a simulated step goes, by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actbench.results.measured import OTHERS, EstimatedTime, MeasuredRecord, Measurement
from actbench.results.tables.columns import Column
from actbench.results.tables.table import Table, fill

DEAREST = 10
"""Most operators in a table."""

_REST, _ALL = "(all others)", "step"


@dataclass(frozen=True)
class _Operator:
    """An operator, with its seconds and calls under each scheme."""

    name: str
    seconds: Mapping[str, float]
    calls: Mapping[str, int]


def operator_tables(records: Sequence[MeasuredRecord]) -> list[Table]:
    """Return, for each simulated case, the operators that take most of the step's estimated time.

    Schemes of one case are side by side, and the rows add up to the step.
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
    seconds = {scheme: {each.name: each.seconds for each in time.by_operator} for scheme, time in times.items()}
    calls = {scheme: {each.name: each.calls for each in time.by_operator} for scheme, time in times.items()}
    names = {name for each in seconds.values() for name in each} - {OTHERS}
    ranked = sorted(names, key=lambda name: -max(each.get(name, 0.0) for each in seconds.values()))
    rows = [
        _Operator(
            name,
            {scheme: each[name] for scheme, each in seconds.items() if name in each},
            {scheme: each[name] for scheme, each in calls.items() if name in each},
        )
        for name in ranked[:DEAREST]
    ]
    named = set(ranked[:DEAREST])
    rest = {scheme: sum(each[name] for name in each.keys() - named) for scheme, each in seconds.items()}
    rows += [
        _Operator(_REST, rest, {}),
        _Operator(_ALL, {scheme: time.step_seconds for scheme, time in times.items()}, {}),
    ]
    title = f"Where the time of a step of {case.model} goes, batch {case.batch_size}, {case.device_profile}, est."
    columns = [column for scheme in times for column in _of_scheme(scheme)]
    return fill(title, (Column("operator", "Operator", "text", lambda row: row.name), *columns), rows)


def _of_scheme(scheme: str) -> tuple[Column[_Operator], ...]:
    return (
        Column(f"{scheme}_seconds", scheme, "seconds", lambda row: row.seconds.get(scheme)),
        Column(f"{scheme}_calls", f"{scheme}, calls", "count", lambda row: row.calls.get(scheme), detail=1),
    )
