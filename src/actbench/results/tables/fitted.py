"""The stacks that ``actbench fit`` tried for one exact step, from its records, and which are worth showing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actbench.results.advice import needed_bytes
from actbench.results.fits import FitRecord, Training, step_seconds_of
from actbench.results.measured import Measurement
from actbench.results.records import Case

MOST_ROWS = 10
_ALIKE = 0.02  # share of a step's time; the errors of estimates are larger


@dataclass(frozen=True)
class Tried:
    """A simulated stack, beside the exact step.

    Attributes:
        exact_seconds: Estimated time of the exact step.
        on_frontier: Whether no tried stack needs less and is as fast.
    """

    record: FitRecord
    measured: Measurement
    seconds: float
    exact_seconds: float
    on_frontier: bool = False

    @property
    def training(self) -> Training:
        """How its training differs from the exact step's."""
        return self.record.training

    @property
    def slowdown(self) -> float:
        """Its time over the exact step's."""
        return self.seconds / self.exact_seconds

    def outdoes(self, other: Tried) -> bool:
        """Whether it is as fast as ``other``, as far as estimates tell, and nearer to the exact step's training."""
        nearer = self.training.is_as_near(other.training) and self.training != other.training
        return nearer and self.seconds <= (1 + _ALIKE) * other.seconds

    @property
    def need_bytes(self) -> int:
        """Bytes of the device that it needs, with those that the allocator loses between blocks."""
        return needed_bytes(self.measured)


@dataclass(frozen=True)
class Fitted:
    """All stacks that were tried for one exact step, the fastest first; ``exact`` is one of them.

    Attributes:
        on_device: Records measured on a device, with failures.
    """

    exact: Tried
    tried: tuple[Tried, ...]
    on_device: tuple[FitRecord, ...] = ()

    @property
    def case(self) -> Case:
        """The case of the exact step."""
        return self.exact.record.case

    @property
    def max_slowdown(self) -> float:
        """The largest slowdown of the last request."""
        return self.exact.record.asked.max_slowdown

    def fitting(self, *, adapters: bool = False) -> list[Tried]:
        """Return the stacks that fit and are fast enough, the fastest first."""
        trained = "adapters" if adapters else "all"
        return [
            each
            for each in self.tried
            if each.measured.fits and each.training.trained == trained and each.slowdown <= self.max_slowdown
        ]

    def shortlist(self, *, adapters: bool = False) -> list[Tried]:
        """Return the rows of a shortlist: the fastest of each way of training, then the frontier and other stacks.

        A stack is left out if another is as fast, within the error of estimates, and nearer to the exact step's
        training. If nothing fits, return the three stacks that need least.
        """
        everything = self.fitting(adapters=adapters)
        if not everything:
            trained = "adapters" if adapters else "all"
            alike = [each for each in self.tried if each.training.trained == trained]
            return sorted(alike, key=lambda each: each.need_bytes)[:3]
        fitting = [each for each in everything if not any(other.outdoes(each) for other in everything)]
        first = [
            each
            for place, each in enumerate(fitting)
            if not any(earlier.training.is_as_near(each.training) for earlier in fitting[:place])
        ]
        others = [each for each in fitting if each not in first]
        others.sort(key=lambda each: not each.on_frontier)
        chosen = [*first, *others][:MOST_ROWS]
        return [each for each in fitting if each in chosen]


def fitted(records: Iterable[FitRecord]) -> list[Fitted]:
    """Return the tried stacks of each exact step in the records."""
    groups: dict[Case, list[FitRecord]] = {}
    exact: dict[Case, FitRecord] = {}
    for record in (record for record in records if not record.of_copy):
        what = simulated(record.case).model_copy(update={"scheme": "exact", "optimizer": record.asked.optimizer})
        groups.setdefault(what, []).append(record)
        if record.case == what:
            exact[what] = record
    return [found for what, group in groups.items() if what in exact and (found := _fitted(exact[what], group))]


def _fitted(exact: FitRecord, records: Sequence[FitRecord]) -> Fitted | None:
    seconds = _seconds(exact)
    if seconds is None:
        return None
    on_device = tuple(record for record in records if record.case.meter != "simulated")
    found = [
        Tried(record, record.outcome, time, seconds)
        for record in records
        if isinstance(record.outcome, Measurement) and (time := _seconds(record)) is not None
    ]
    tried = _with_frontier(sorted(found, key=lambda each: (each.seconds, each.need_bytes)))
    return Fitted(next(each for each in tried if each.record is exact), tuple(tried), on_device)


def simulated(case: Case) -> Case:
    """Return the simulated case of a measured one."""
    return case.model_copy(update={"meter": "simulated"})


def _seconds(record: FitRecord) -> float | None:
    return step_seconds_of(record.outcome) if isinstance(record.outcome, Measurement) else None


def _with_frontier(tried: Sequence[Tried]) -> list[Tried]:
    marked, least = [], float("inf")
    for each in tried:
        is_on = each.need_bytes < least
        least = min(least, each.need_bytes)
        marked.append(Tried(each.record, each.measured, each.seconds, each.exact_seconds, is_on))
    return marked
