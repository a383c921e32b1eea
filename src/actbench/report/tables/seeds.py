"""Merges records that differ only in the seed: means, and the standard deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from actbench.model.data import Data
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.report.tables.groups import FIELDS, group_of

DataT = TypeVar("DataT", bound=Data)

_SEED: Final = 2 + FIELDS.index("seed")  # of a group, behind the machine and its GPU
_PARTS: Final = ("peak_parts", "phase_peaks", "estimated")  # fields whose numbers are averaged, too
_POOLED: Final = ("step_seconds", "exact_step_seconds")
_LIMIT: Final = "over_limit_bytes"


class Seeded(NamedTuple):
    """A record, or one for several of them: ``of`` are those that differ in the seed alone, by their seeds."""

    record: MeasuredRecord
    of: tuple[MeasuredRecord, ...] = ()

    @property
    def seeds(self) -> str | int:
        """The seed, or all of them."""
        return ", ".join(str(each.case.seed) for each in self.of) if self.of else self.record.case.seed

    def spread(self, name: str) -> float | None:
        """Return the sample standard deviation of a number over the seeds; None if 0, infinite or not known of all."""
        values = [getattr(each.outcome, name, None) for each in self.of]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) < 2 or len(numbers) < len(values) or not all(map(math.isfinite, numbers)):
            return None  # of infinite numbers statistics.stdev is NaN, or an AttributeError before Python 3.12
        return statistics.stdev(numbers) or None


def over_seeds(
    records: Sequence[MeasuredRecord], part: Callable[[MeasuredRecord], Hashable] = lambda record: None
) -> list[Seeded]:
    """Return records in their order, one in place of several measured ones that differ in nothing but the seed.

    It stands where the first of them stood, and has the case of the smallest seed. Numbers are means, seconds of steps
    are those of all, and one that is over its limit is so with the largest excess. Of several records of one seed the
    latest counts. Records for which ``part`` gives different values stay apart.
    """
    if len({record.case.seed for record in records}) < 2:
        return list(map(Seeded, records))
    groups: dict[Any, list[MeasuredRecord]] = {}
    for place, record in enumerate(records):
        group = group_of(record)
        key = (*group[:_SEED], *group[_SEED + 1 :], record.case.scheme, record.label, part(record))
        is_measured = isinstance(record.outcome, Measurement)
        groups.setdefault(key if is_measured else place, []).append(record)
    return [_as_one(same) if len(same) > 1 else Seeded(same[0]) for same in map(_latest, groups.values())]


def _latest(records: Sequence[MeasuredRecord]) -> list[MeasuredRecord]:
    """Return the latest record of each seed; of those that are as late, the last."""
    by_time = sorted(records, key=lambda record: record.recorded_at)
    return list({record.case.seed: record for record in by_time}.values())


def _as_one(records: Sequence[MeasuredRecord]) -> Seeded:
    of = tuple(sorted(records, key=lambda record: record.case.seed))
    outcomes = [record.outcome for record in of if isinstance(record.outcome, Measurement)]
    update: dict[str, Any] = {}
    for name in _POOLED:
        if all(seconds := [getattr(each, name) for each in outcomes]):
            update[name] = tuple(second for each in seconds for second in each)
    if all(rounds := [each.timing_round for each in outcomes]):
        update["timing_round"] = "+".join(map(str, rounds))
    if any(over := [each.over_limit_bytes for each in outcomes]):
        update[_LIMIT] = max(filter(None, over))
    for name in _PARTS:
        if all(parts := [getattr(each, name) for each in outcomes]):
            update[name] = _mean(parts)
    names = [[found.name for found in each.diagnostics] for each in outcomes]
    if all(each == names[0] for each in names):
        together = zip(*(each.diagnostics for each in outcomes), strict=True)
        update["diagnostics"] = tuple(map(_mean, together))
    return Seeded(of[0].model_copy(update={"outcome": _mean(outcomes).model_copy(update=update)}), of)


def _mean(found: Sequence[DataT]) -> DataT:
    """Return the first of several with the means of its numbers."""
    return found[0].model_copy(update=dict(_means(found)))


def _means(found: Sequence[Data]) -> Iterator[tuple[str, float]]:
    for name in type(found[0]).model_fields:
        values = [getattr(each, name) for each in found]
        if name != _LIMIT and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            mean = statistics.fmean(values)
            yield name, round(mean) if all(isinstance(value, int) for value in values) else mean
