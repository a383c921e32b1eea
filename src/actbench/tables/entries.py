"""Records side by side: each with the exact model's and the estimate of its case, marked when no other beats it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from actbench.records import Built, Case, Measurement, Record
from actbench.tables.estimates import Estimates
from actbench.tables.frontier import Costs, unbeaten
from actbench.tables.order import ordered
from actbench.tables.timing import Spread, ratio, step_time, throughput

_comparable = attrgetter(*(name for name in Case.model_fields if name != "scheme"))
_what_is_built = attrgetter("model", "task", "sequence_length", "image_size", "dtype", "optimizer", "trust_remote_code")


@dataclass(frozen=True, slots=True)
class Entry:
    """A record with the measurements it is read against.

    Attributes:
        record: The record.
        measured: Its measurement, or None when the case failed.
        exact: What the exact model measured in the same case on the same machine.
        estimate: What the simulated meter said of the same model, scheme and batch, for a record of another meter.
        same_model: A measurement of the same model, fed the same, of the exact one if there is one: a failed record
            says less.
        step: Seconds of a step.
        relative_throughput: Throughput over that of the exact model, which is 1 without a spread for the exact model
            itself. None where the two were not timed together: drift between two sessions is no property of a scheme.
        pareto: Whether no scheme of the same case saves more at the same speed; None where there is nothing to choose.
    """

    record: Record
    measured: Measurement | None
    exact: Measurement | None
    estimate: Measurement | None
    same_model: Measurement | None
    step: Spread | None
    relative_throughput: Spread | None
    pareto: bool | None

    def own(self, setting: Literal["dtype", "optimizer"]) -> str:
        """Return a setting of the case, or where it leaves that to the model what the model brought."""
        asked: str | None = getattr(self.record.case, setting)
        return asked or getattr(self.same_model, setting, None) or "the model's own"

    @property
    def built(self) -> Built | None:
        """What the model and task of the case came to; of a failed case what they came to in another row."""
        known = self.measured or self.same_model
        return known.built if known else None

    @property
    def throughput(self) -> Spread | None:
        """Samples a second."""
        return throughput(self.record.case.batch_size, self.step)


@dataclass(frozen=True, slots=True)
class _Exact:
    """What the exact model measured, with its steps."""

    measured: Measurement
    step: Spread | None


def join(records: Sequence[Record]) -> list[Entry]:
    """Return an entry for each record, in an order that depends on the cases only, not on when they were measured.

    Rows that can be compared stand beside each other, the exact model first, then simple schemes, then composed ones.
    """
    rows = ordered(records)
    numbers: dict[Any, int] = {}
    groups = [numbers.setdefault(_group(record), len(numbers)) for record in rows]
    exact = _exact(rows, groups)
    measured = list(map(_measured, rows))
    steps = [step_time(found.step_seconds) if found else None for found in measured]
    speeds = [_speed(*each) for each in zip(measured, steps, map(exact.get, groups), strict=True)]
    best = _best(measured, groups, speeds)
    estimates, same_model = Estimates(records), _by_model(records)
    return [
        Entry(
            record,
            measured=outcome,
            exact=exact[group].measured if group in exact else None,
            estimate=estimates.of(record),
            same_model=same_model.get(_what_is_built(record.case)),
            step=step,
            relative_throughput=speed,
            pareto=pareto,
        )
        for record, outcome, group, step, speed, pareto in zip(rows, measured, groups, steps, speeds, best, strict=True)
    ]


def _measured(record: Record) -> Measurement | None:
    return record.outcome if isinstance(record.outcome, Measurement) else None


def _group(record: Record) -> Any:
    """Return what the records of the schemes that can be compared have in common."""
    return record.machine.name, record.machine.gpu or "", _comparable(record.case)


def _exact(records: Sequence[Record], groups: Sequence[int]) -> dict[int, _Exact]:
    """Return the exact model's measurement in each group, where it has one."""
    last = {group: _measured(record) for record, group in zip(records, groups, strict=True) if _is_exact(record)}
    return {group: _Exact(found, step_time(found.step_seconds)) for group, found in last.items() if found is not None}


def _by_model(records: Sequence[Record]) -> dict[Any, Measurement]:
    """Return a measurement of each model, of the exact one where that was measured."""
    found: dict[Any, Measurement] = {}
    for is_exact in (True, False):
        for record in records:
            if _is_exact(record) is is_exact and isinstance(record.outcome, Measurement):
                found.setdefault(_what_is_built(record.case), record.outcome)
    return found


def _is_exact(record: Record) -> bool:
    return record.case.scheme == "exact"


def _speed(measured: Measurement | None, step: Spread | None, exact: _Exact | None) -> Spread | None:
    """Return the throughput over that of the exact model's steps that took turns with these."""
    if measured is None or step is None:
        return None
    if exact is not None and exact.measured is measured:
        return Spread(1.0)
    if exact is not None and exact.measured.timing_round == measured.timing_round:
        return ratio(exact.step, step)
    return ratio(step_time(measured.exact_step_seconds), step)


def _best(
    measured: Sequence[Measurement | None], groups: Sequence[int], speeds: Sequence[Spread | None]
) -> list[bool | None]:
    """Return for each row whether none of its group beats it; None where it is alone or has no speed."""
    costs: dict[int, dict[int, Costs]] = defaultdict(dict)
    for place, (outcome, group, speed) in enumerate(zip(measured, groups, speeds, strict=True)):
        if outcome is not None and speed is not None:
            costs[group][place] = (outcome.peak_bytes, -speed.value)
    best: list[bool | None] = [None] * len(measured)
    for rivals in costs.values():
        if len(rivals) > 1:
            for place, mark in zip(rivals, unbeaten(list(rivals.values())), strict=True):
                best[place] = mark
    return best
