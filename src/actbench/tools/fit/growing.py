"""How long a sequence or how large a batch a card takes: plans that need little, simulated at growing sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from actbench.errors import MeasurementError
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case
from actbench.report.advice import needed_bytes
from actbench.tools.fit.fitting import Fitting
from actbench.tools.fit.levels import Level
from actbench.tools.fit.plan import Plan
from actbench.tools.fit.planner import Goal, Planner
from actbench.tools.fit.records import Asked, step_seconds_of

Axis = Literal["sequence_length", "batch_size"]
"""What grows."""

LARGEST = 1 << 22
"""No size beyond it is tried."""

Simulated = tuple[Case, Outcome]

_SURVEYS = 3  # of one level; a plan that needs least of short samples may not need least of long ones
_OF_SURVEY = 0.4  # share of the time that is left; the rest is for sizes
_STRIDE = 16  # times as large a size may be tried after one that fits
_PATIENCE = 3  # guesses of a straight line; then the middle is tried
_PRECISION = 0.002  # share of the least peak to which the least that is fast enough is found


@dataclass(frozen=True)
class Largest:
    """The largest size at which a plan of a level fits.

    Attributes:
        level: How far training may differ.
        size: The size; 0 if not even one token, or one row, fits.
        case: The case of the fastest plan found at the size, or of what needs least at 1.
        measured: Its simulation.
        exact_seconds: Estimated time of the exact step at this size.
        beyond_bytes: What the plan that needs least would need at one more; None if it cannot be simulated there, or if
            it is too slow there.
        why_no_more: Why one more cannot be simulated, or how slow the step is there.
    """

    level: Level
    size: int
    case: Case
    measured: Measurement
    exact_seconds: float
    beyond_bytes: int | None = None
    why_no_more: str = ""

    @property
    def need(self) -> int:
        """Bytes of the device that it needs."""
        return needed_bytes(self.measured)

    @property
    def slowdown(self) -> float:
        """Its time over the exact step's at this size."""
        return (step_seconds_of(self.measured) or math.inf) / self.exact_seconds


@dataclass
class Grower:
    """Finds largest sizes of one model on one card.

    Attributes:
        made: What simulates.
        case: The case of the exact step, at any size, with its limit.
        asked: What counts as an answer.
        axis: What grows.
    """

    made: Fitting
    case: Case
    asked: Asked
    axis: Axis
    _planners: dict[int, Planner] = field(default_factory=dict, repr=False)
    _exact: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def limit(self) -> int:
        """Bytes that a step may use."""
        return self.case.memory_limit_bytes or 0

    def run(self, levels: Sequence[Level]) -> list[Largest | None]:
        """Return the largest size for each level; None if there are no plans of it, or no time was left for any.

        Each level has its first search before any has a second one.

        Raises:
            MeasurementError: The exact step cannot be simulated.
        """
        self._surveyed(getattr(self.case, self.axis))
        best = dict[Level, Largest | None].fromkeys(levels)
        growing = list(levels)
        for _ in range(_SURVEYS):
            for level in list(growing):
                with self.made.searching("sizes", 1 / len(growing)):
                    found = self._larger(level, best[level])
                if found is not None:
                    best[level] = found
                if found is None or found.size in (0, LARGEST):
                    growing.remove(level)
        return [self._quickened(each) if each is not None and each.size else each for each in best.values()]

    def _larger(self, level: Level, best: Largest | None) -> Largest | None:
        """Return what another survey, at the largest size so far, finds beyond it; None if nothing."""
        size = getattr(self.case, self.axis) if best is None else best.size
        if best is not None and not self.made.budget.left_seconds:
            return None
        try:
            plan = self._least(self._surveyed(size), level)
        except MeasurementError:  # of a larger size: there was no time for the exact step, or it cannot be
            if best is None:
                raise
            return None
        grown = self._grown(level, plan, size) if plan is not None else None
        return grown if grown is not None and (best is None or grown.size > best.size) else None

    def _surveyed(self, size: int) -> Planner:
        if size not in self._planners:
            case = self._at(size)
            choices = self.made.choices(case, self.asked)
            if self.axis == "batch_size":
                choices = replace(choices, in_parts=())  # in micro-batches any batch fits of which one row does
            planner = self.made.planner(case, self.asked, choices)
            with self.made.searching("single changes", _OF_SURVEY):
                planner.run()
            self._planners[size] = planner
        return self._planners[size]

    def _at(self, size: int) -> Case:
        return self.case.model_copy(update={self.axis: size})

    def _least(self, planner: Planner, level: Level) -> Plan | None:
        """Return the plan that needs least of those that are fast enough; None if none is."""
        space = planner.space
        least = space.least(level, planner.most_squared_error)
        seconds = self.asked.max_slowdown * planner.exact_step.seconds
        if least is None or least.seconds <= seconds:
            return least.plan if least else None
        enough, low, high = None, least.peak, max(float(planner.exact_step.need), least.peak)
        while enough is None or high - low > _PRECISION * least.peak:
            limit = (low + high) / 2 if enough else high
            solved = space.solve(level, limit, planner.most_squared_error)
            if solved is not None and solved.seconds <= seconds:
                enough, high = solved, min(limit, solved.peak)
            elif enough is None:
                return None
            else:
                low = limit
        return enough.plan

    def _grown(self, level: Level, plan: Plan, size: int, *more: int) -> Largest | None:
        """Return the largest size at which a plan fits, by simulations of it at several; None if none can be had.

        The first are at a surveyed size and at ``more``.
        """
        places = self._planners[size].space.blocks.whole

        def simulated(sizes: Iterable[int]) -> dict[int, Simulated]:
            cases = {plan.case(self._at(each), places): plan for each in sizes}
            found = self.made.simulations(self.case, self.asked)(cases)
            return {getattr(case, self.axis): (case, outcome) for case, outcome in found}

        search = Search(simulated, self.limit, self._is_fast)
        fits = search.run(size, *more)
        case, outcome = search.known.get(fits or 1, (self.case, None))
        if not isinstance(outcome, Measurement):
            return None
        _, beyond = search.known.get(fits + 1, (None, None))
        grown = Largest(level, fits, case, outcome, self._exact_seconds(fits or 1))
        if not isinstance(beyond, Measurement):
            return replace(grown, why_no_more=getattr(beyond, "message", ""))
        if (need := needed_bytes(beyond)) > self.limit:
            return replace(grown, beyond_bytes=need)
        slowdown = self._slowdown(fits + 1, beyond)
        return replace(grown, why_no_more=f"{slowdown:.3g} times the exact step's time" if slowdown else "")

    def _is_fast(self, size: int, measured: Measurement) -> bool:
        slowdown = self._slowdown(size, measured)
        return slowdown is not None and slowdown <= self.asked.max_slowdown

    def _slowdown(self, size: int, measured: Measurement) -> float | None:
        """Return a plan's time over the exact step's at a size; None if there was no time to simulate that."""
        seconds, exact = step_seconds_of(measured), self._exact_seconds(size)
        return seconds / exact if seconds and math.isfinite(exact) else None

    def _exact_seconds(self, size: int) -> float:
        if size not in self._exact:
            self._exact[size] = step_seconds_of(self.made.simulated(self._at(size), self.case, self.asked)) or math.nan
        return self._exact[size]

    def _quickened(self, best: Largest) -> Largest:
        """Return the fastest plan at the largest size, if that size was surveyed; it may fit at more, too.

        The allocator loses other bytes of it than of the plan whose tensors need least.
        """
        planner = self._planners.get(best.size)
        if planner is None:
            return best
        goal = Goal(best.level, self.limit)
        planner.pursue([goal])
        fastest = planner.fastest(goal)
        if fastest is None or fastest.seconds >= (step_seconds_of(best.measured) or math.inf):
            return best
        grown = self._grown(best.level, fastest.plan, best.size, best.size + 1)
        if grown is not None and grown.size > best.size:
            return grown
        return replace(best, case=fastest.case, measured=fastest.measured)


class Search:
    """The largest size that fits, and one more that does not, both simulated.

    Args:
        simulate: Simulates sizes; leaves out those for which there is no time.
        limit: Bytes that a step may use.
        is_fast: Whether a size within the limit is fast enough; it does not count as fitting otherwise.

    Attributes:
        known: The simulations, by size.
    """

    def __init__(
        self,
        simulate: Callable[[Iterable[int]], Mapping[int, Simulated]],
        limit: int,
        is_fast: Callable[[int, Measurement], bool] = lambda size, measured: True,
    ) -> None:
        self._simulate, self._limit, self._is_fast = simulate, limit, is_fast
        self.known: dict[int, Simulated] = {}

    def run(self, *start: int) -> int:
        """Return the largest size that fits; 0 if not even 1 does. Neighbours are simulated side by side."""
        is_in_time = self._ask(*start)
        while is_in_time and not self._fits() and self._least() > 1:
            is_in_time = self._ask(self._least() // 2)
        turn = 0
        while is_in_time and (guess := self._guess(self._fits(), turn)) is not None:
            is_in_time, turn = self._ask(guess, min(guess + 1, LARGEST)), turn + 1
        return self._fits()

    def _ask(self, *sizes: int) -> bool:
        """Simulate sizes, and return whether there was time for one that was not known."""
        known = len(self.known)
        self.known.update(self._simulate([size for size in sizes if size not in self.known]))
        return len(self.known) > known

    def _need(self, size: int) -> float:
        """Return the bytes that a size needs; infinite if it cannot be simulated, or is too slow."""
        _, outcome = self.known[size]
        if not isinstance(outcome, Measurement):
            return math.inf
        need = needed_bytes(outcome)
        return need if need > self._limit or self._is_fast(size, outcome) else math.inf

    def _fits(self) -> int:
        return max((size for size in self.known if self._need(size) <= self._limit), default=0)

    def _least(self) -> int:
        return min(self.known, default=1)

    def _guess(self, fits: int, turn: int) -> int | None:
        """Return the size to try next, where a straight line through two needs meets the limit; None at the end."""
        over = min((size for size in self.known if size > fits), default=None)
        if not fits or over == fits + 1 or fits >= LARGEST:
            return None
        other = max((size for size in self.known if size < fits), default=None) if over is None else over
        low, high = fits + 1, min(_STRIDE * fits, LARGEST) if over is None else over - 1
        if over is not None and turn % _PATIENCE == _PATIENCE - 1:
            return (low + high) // 2
        if other is None:
            return min(2 * fits, high)
        if not math.isfinite(self._need(other)) or self._need(other) == self._need(fits):
            return (low + high) // 2 if over else high
        slope = (self._need(other) - self._need(fits)) / (other - fits)
        met = fits + (self._limit - self._need(fits)) / slope if slope > 0 else high
        return int(min(max(met, low), high))
