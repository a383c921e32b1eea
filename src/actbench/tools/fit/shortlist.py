"""Which of the plans that were simulated are worth showing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from actbench.model.contents import Content, content_of
from actbench.model.gradient import GRADIENTS
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.tools.fit.records import MARGIN, FitRecord, Tried, step_seconds_of, to_nine_digits
from actbench.tools.fit.usual import is_usual

_ALIKE = 0.02  # share of a step's time; the errors of estimates are larger


@dataclass(frozen=True)
class Fitted:
    """All plans that were simulated for one exact step, the fastest first; ``exact`` is one of them.

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

    @property
    def limit_bytes(self) -> int:
        """Memory that a step may use."""
        return self.exact.record.asked.limit_bytes or self.exact.measured.memory_limit_bytes or 0

    @property
    def least(self) -> Tried:
        """The plan that needs least."""
        return min(self.tried, key=lambda each: each.need_bytes)

    def fits(self, tried: Tried) -> bool:
        """Whether a plan needs no more than the limit."""
        return tried.need_bytes <= self.limit_bytes

    def nearest(self, *, adapters: bool = False) -> list[Tried]:
        """Return three plans to show where none fits and is fast enough.

        These are the fastest of those that fit, or else those that need least.
        """
        alike = self._alike(adapters)
        fitting = [each for each in alike if self.fits(each)]
        return (fitting or sorted(alike, key=lambda each: each.need_bytes))[:3]

    def _alike(self, adapters: bool) -> list[Tried]:
        if adapters and self.exact.training.trained == "adapters":
            return []  # all plans train them
        trained = "adapters" if adapters else self.exact.training.trained
        return [each for each in self.tried if each.training.trained == trained]

    def shortlist(self, *, adapters: bool = False) -> list[Tried]:
        """Return the rows of a shortlist: the fastest plan that fits for each way of training.

        A plan that trains further from the exact step is left out unless it is faster by more than estimates may be
        off.
        """
        kept: list[Tried] = []
        fitting = [each for each in self._alike(adapters) if self.fits(each) and each.slowdown <= self.max_slowdown]
        nearer = {
            id(one): sum(two.training != one.training and two.training.is_as_near(one.training) for two in fitting)
            for one in fitting
        }
        for each in sorted(fitting, key=lambda each: (nearer[id(each)], each.seconds)):
            if not any(other.training.is_as_near(each.training) and _is_as_fast(other, each) for other in kept):
                kept.append(each)
        return [each for each in fitting if each in kept]

    @property
    def has_shortlist(self) -> bool:
        """Whether some plan fits and is fast enough, with adapters or without."""
        return bool(self.shortlist() or self.shortlist(adapters=True))

    def listed(self) -> list[Tried]:
        """Return the rows of a table: both shortlists, or else what is nearest to them."""
        rows = self.shortlist if self.has_shortlist else self.nearest
        return [*rows(), *rows(adapters=True)]

    def usual(self) -> list[Tried]:
        """Return the usual stacks that were simulated, and the exact step, the fastest first."""
        base = self.exact.record.asked.scheme
        alike = (each for each in self.tried if each.record.case.optimizer == self.exact.record.case.optimizer)
        return [each for each in alike if each is self.exact or is_usual(each.record.case.scheme, base)]

    def uniform(self, *, exact: bool) -> Tried | None:
        """Return the fastest plan that fits and does the same with all blocks, of exact or of any gradients."""
        return next((each for each in self._comparable(exact=exact) if each.is_uniform and self.fits(each)), None)

    def frontier(self, *, exact: bool) -> list[Tried]:
        """Return the plans, of exact or of any gradients, that no other undercuts in both bytes and time."""
        front: list[Tried] = []
        for each in self._comparable(exact=exact):
            if not front or each.need_bytes < front[-1].need_bytes:
                front.append(each)
        return front

    def _comparable(self, *, exact: bool) -> list[Tried]:
        """Return the plans with the exact step's parameters, updates and precision, the fastest first."""
        furthest = self.exact.training.model_copy(update={} if exact else {"gradient": GRADIENTS[-1]})
        return [each for each in self.tried if each.training.is_as_near(furthest)]


def _is_as_fast(nearer: Tried, other: Tried) -> bool:
    slack = 0.0 if nearer.training == other.training else _ALIKE
    return nearer.seconds <= (1 + slack) * other.seconds


def fitted(records: Iterable[FitRecord]) -> list[Fitted]:
    """Return the simulated plans of each exact step in the records."""
    groups: dict[tuple[Case, Content], list[FitRecord]] = {}
    exact: dict[tuple[Case, Content], FitRecord] = {}
    of_plans = (record for record in records if not record.of_copy)
    for record in chain.from_iterable(each.of_requests() for each in of_plans):
        asked = record.asked
        limit = asked.limit_bytes or record.case.memory_limit_bytes
        of_exact = {"scheme": asked.scheme, "optimizer": asked.optimizer, "memory_limit_bytes": limit}
        what = record.case.model_copy(update={"meter": "simulated", **of_exact}), content_of(record)
        groups.setdefault(what, []).append(record)
        if record.case == what[0]:
            exact[what] = record
    return [found for what, group in groups.items() if what in exact and (found := _fitted(exact[what], group))]


def _fitted(exact: FitRecord, records: Sequence[FitRecord]) -> Fitted | None:
    seconds = step_seconds_of(exact.outcome)
    if seconds is None or not isinstance(exact.outcome, Measurement):
        return None
    on_device = tuple(record for record in records if record.case.meter != "simulated")
    read = exact.outcome.blocks
    blocks = tuple(block.path for block in read.blocks) if read else ()
    least: dict[Case, Tried] = {}  # a plan that was simulated for several budgets needs least with the smallest
    for record in (record for record in records if _is_right(record, exact)):
        if isinstance(record.outcome, Measurement) and (time := step_seconds_of(record.outcome)) is not None:
            asked = record.model_copy(update={"asked": exact.asked})  # the last request may not have tried it again
            tried, plan = Tried(asked, record.outcome, time, seconds, blocks), without_limit(record.case)
            if plan not in least or _excess(tried) < _excess(least[plan]):
                least[plan] = tried
    in_order = tuple(sorted(least.values(), key=lambda each: (to_nine_digits(each.seconds), each.need_bytes)))
    return Fitted(least[without_limit(exact.case)], in_order, on_device)


def _excess(tried: Tried) -> tuple[bool, int]:
    """Return whether a plan needed more than its simulation allowed, and its need."""
    limit = tried.record.case.memory_limit_bytes
    return limit is not None and tried.need_bytes > limit, tried.need_bytes


def _is_right(record: FitRecord, exact: FitRecord) -> bool:
    """Whether the error of a gradient is within the limit, with a margin."""
    most, error = exact.asked.max_gradient_error, record.gradient_error
    return most is None or record.case == exact.case or (error is not None and MARGIN * error <= most)


def without_limit(case: Case) -> Case:
    """Return a case without a memory limit: a plan is the same at all budgets."""
    return case.model_copy(update={"memory_limit_bytes": None})
