"""Makes plans: solves for the fastest, simulates it whole, and solves again if the survey had predicted less."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.report.advice import needed_bytes
from actbench.simulator import profiles
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.counts import is_refusal
from actbench.tools.fit.effects import matters
from actbench.tools.fit.errors import ErrorMeter
from actbench.tools.fit.join import Joins
from actbench.tools.fit.levels import ANY, EXACT, Level
from actbench.tools.fit.plan import Plan
from actbench.tools.fit.records import MARGIN, step_seconds_of, to_nine_digits
from actbench.tools.fit.setting import Solved
from actbench.tools.fit.survey import Survey
from actbench.tools.fit.usual import USUAL
from actbench.units import format_bytes

_ROUNDS = 4  # a plan is corrected by its whole simulation so often, and the last correction is simulated, too
BUDGETS = 20
"""How many limits of memory a frontier has a plan for."""

_ROOM = 0.01  # share of the least peak that the smallest budget of a frontier has more: the allocator loses some
_MORE_TRACES = 4  # that the plans of frontiers may need beyond those of the answer
_MOST_SIMPLE = 2  # plans that do one thing with some blocks, simulated for a goal
_WRONG_SECONDS = 0.0005  # share of a step's time that the sum of its parts is off
_ENOUGH = 0.002  # share of a limit that may be left unused before a plan is corrected


@dataclass(frozen=True)
class Goal:
    """The fastest plan of a level within a limit of bytes is wanted.

    Attributes:
        uniform: Whether it has to do the same with all blocks.
        slowest: Seconds; a plan that takes longer is not worth a simulation.
    """

    level: Level
    limit: int
    uniform: bool = False
    slowest: float = math.inf


@dataclass(frozen=True)
class Found:
    """A plan that was simulated whole, or joined.

    Attributes:
        limit: Bytes that the simulation allowed.
        predicted: What the costs of its parts had added up to; None for the exact step.
        is_joined: Whether it was joined from traces, and not simulated whole.
    """

    plan: Plan
    case: Case
    limit: int
    measured: Measurement
    predicted: Solved | None = None
    is_joined: bool = False

    @property
    def need(self) -> int:
        """Bytes of the device that it needs."""
        return needed_bytes(self.measured)

    @property
    def seconds(self) -> float:
        """Estimated time of a step."""
        return step_seconds_of(self.measured) or math.inf


@dataclass
class Planner(Survey):
    """A survey, and the plans that were made from it.

    Attributes:
        found: These plans, in order, simulated whole or joined.
        most_squared_error: Of the gradient.
        knows_least: Whether the plan of each level that needs least was simulated.
        is_joining: Whether plans are joined where their traces are known; otherwise all are simulated whole.
        note: Told of each plan that was joined.
        errors: Of plans that were joined and then simulated whole: shares of the peak that the joined one was off.
    """

    most_squared_error: float = math.inf
    found: list[Found] = field(default_factory=list)
    knows_least: bool = False
    is_joining: bool = True
    note: Callable[[Case, Plan, Measurement], object] = lambda case, plan, measured: None
    errors: list[float] = field(default_factory=list)
    _joins: Joins = field(init=False, repr=False)
    _traces_left: float = field(default=math.inf, repr=False)  # that may be simulated to join plans
    _predicted: dict[Case, Solved] = field(default_factory=dict, repr=False)
    _impossible: set[Plan] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        """Join plans from what the survey simulates."""
        self._joins = Joins(self, self.exact.device_profile or profiles.DEFAULT)

    def limit_error(self, most: float) -> None:
        """Measure errors of the gradient, and make plans that have at most this one.

        Call it before plans are made.
        """
        exact = self.outcomes[self.exact]
        assert isinstance(exact, Measurement)
        meter = ErrorMeter(self.exact, exact.weights_bytes, self.space.blocks, self.simulate)
        self.space.know(meter.run(*self.space.inexact()))
        self.most_squared_error = (most / MARGIN) ** 2

    def try_usual(self) -> None:
        """Simulate the usual stacks of which all schemes may be chosen."""
        exact = self.outcomes[self.exact]
        assert isinstance(exact, Measurement)
        known = {choice.name: choice for choice in self.choices.all if matters(choice, exact)}
        plans = [
            self._same_for_all_blocks(known[name] for name in stack) for stack in USUAL if known.keys() >= set(stack)
        ]
        self.measured({plan.case(self.exact, self.space.blocks.whole): plan for plan in plans})

    def _same_for_all_blocks(self, choices: Iterable[Choice]) -> Plan:
        chosen = frozenset(choices)
        action = chosen.intersection(self.choices.of_blocks)
        return Plan(chosen - action, (action,) * len(self.space.blocks.paths) if action else ())

    @property
    def exact_step(self) -> Found:
        """The exact step, once it was simulated."""
        return next(each for each in self.found if each.case == self.exact)

    def reaching(self, goal: Goal) -> list[Found]:
        """Return the simulated plans that reach a goal, the fastest first."""
        reach = (each for each in self.found if each.need <= goal.limit and self._is_of(each, goal))
        return sorted(reach, key=lambda each: (to_nine_digits(each.seconds), len(each.plan.choices), each.need))

    def fastest(self, goal: Goal) -> Found | None:
        """Return the fastest simulated plan that reaches a goal."""
        return next(iter(self.reaching(goal)), None)

    def best(self, limit: int) -> str:
        """Return the need and the time of the fastest plan within a limit; empty if none but the exact step is."""
        fitting = [each for each in self.found if each.need <= limit and each.case != self.exact]
        found = min(fitting, key=lambda each: each.seconds, default=None)
        return "" if found is None else f"{format_bytes(found.need)}, {found.seconds / self.exact_step.seconds:.2f}x"

    def answer(self, limit: int, levels: Sequence[Level]) -> None:
        """Simulate the fastest plans within a limit, and what does the same with all blocks; or what needs least."""
        goals = [Goal(level, limit) for level in levels]
        goals += [Goal(level, limit, uniform=True) for level in levels if level in (EXACT, ANY)]
        self.pursue(goals)
        least = [solved for level in levels if (solved := self._least(level, goals, limit)) is not None]
        self._simulate_plans((solved, limit) for solved in least)
        if not any(self.fastest(goal) for goal in goals):
            self.knows_least = bool(least) and all(self._known(solved.plan, limit) is not None for solved in least)

    def _least(self, level: Level, goals: Sequence[Goal], limit: int) -> Solved | None:
        """Return the plan of a level that needs least: if none of it fits but this one may, or if none fits at all."""
        least = self.space.least(level, self.most_squared_error)
        if least is None or self.fastest(Goal(level, limit)) is not None:
            return None
        return least if least.peak <= limit or not any(map(self.fastest, goals)) else None

    def frontiers(self, levels: Sequence[Level], max_slowdown: float = math.inf) -> None:
        """Join the fastest plans at budgets between the least that is possible and what the exact step needs.

        They are made of what was simulated for the answer, and of a few more traces.

        A plan for a smaller budget that turns out to be faster is that of the larger one, too: no curve can rise. What
        takes more than ``max_slowdown`` times as long as the exact step is left out.
        """
        exact = self.exact_step
        goals = []
        for level in levels:
            least = self.space.least(level, self.most_squared_error)
            if least is not None and least.peak < exact.need:
                steps = np.linspace(least.peak * (1 + _ROOM), exact.need, BUDGETS)
                goals += [Goal(level, round(float(budget)), slowest=max_slowdown * exact.seconds) for budget in steps]
        self._traces_left = _MORE_TRACES
        self.pursue(goals, rounds=2, fills=False)
        self._traces_left, self._joins.is_simulating = math.inf, True

    def pursue(self, goals: Sequence[Goal], rounds: int = _ROUNDS, *, fills: bool = True) -> None:
        """Simulate the plans that reach goals, until what they need is what their parts add up to.

        Without ``fills`` a plan that leaves some of its limit unused is good enough: on a frontier, the next one has a
        larger limit anyway. With it, no plan is slower than the best that does one thing with some of the blocks.
        """
        self._correct(goals, rounds, fills=fills)
        if fills:
            self._simplify(goals)

    def _simplify(self, goals: Sequence[Goal]) -> None:
        """Simulate the fastest plans that do one thing with some of the blocks, where they may be faster than the best.

        The allocator loses other bytes with each plan: a correction by what it lost with one passes over others that
        would fit.
        """
        wanted: list[tuple[Solved, int]] = []
        for goal in (each for each in goals if not each.uniform and each.level in (EXACT, ANY)):
            best = self.fastest(goal)
            slowest = min(goal.slowest, best.seconds * (1 + _WRONG_SECONDS) if best else math.inf)
            some = self.space.of_some(goal.level, goal.limit, self.most_squared_error, slowest)
            wanted += [(solved, goal.limit) for solved in some[:_MOST_SIMPLE]]
        self._simulate_plans(wanted)

    def _correct(self, goals: Sequence[Goal], rounds: int, *, fills: bool) -> None:
        aims = {goal: float(goal.limit) for goal in goals}
        while aims and rounds:
            asked = {goal: solved for goal, aim in aims.items() if (solved := self._solved(goal, aim))}
            self._simulate_plans((solved, goal.limit) for goal, solved in asked.items())
            next_aims: dict[Goal, float] = {}
            if self._impossible.isdisjoint(solved.plan for solved in asked.values()):  # else nothing was corrected
                rounds -= 1
            for goal, solved in asked.items():
                aim = self._next_aim(goal, solved, fills=fills)
                if solved.plan in self._impossible:
                    self.space.leave_out(solved.plan, [each.plan for each in self.found])
                    next_aims[goal] = aims[goal]
                elif aim is not None:
                    next_aims[goal] = aim
            aims = next_aims

    def simulated(self, plans: Iterable[Solved], limit: int) -> Found | None:
        """Simulate plans whole within a limit, and return the fastest that fits."""
        wanted = list(plans)
        self._simulate_plans((solved, limit) for solved in wanted)
        known = (self._known(solved.plan, limit) for solved in wanted)
        fitting = [each for each in known if each is not None and each.need <= limit]
        return min(fitting, key=lambda each: each.seconds, default=None)

    def _solved(self, goal: Goal, aim: float) -> Solved | None:
        """Return the fastest plan of a goal whose parts add up to so many bytes at most."""
        if goal.uniform:
            return self.space.uniform(goal.level, aim, self.most_squared_error)
        solved = self.space.solve(goal.level, aim, self.most_squared_error)
        return None if solved is None or solved.seconds > goal.slowest else solved

    def _next_aim(self, goal: Goal, solved: Solved, *, fills: bool) -> float | None:
        """Return the bytes to solve for next, if a plan needs more than was predicted, or much less than the limit."""
        known = self._known(solved.plan, goal.limit)
        if known is None:
            return None
        aim = goal.limit - (known.need - solved.peak)
        spare = goal.limit - known.need
        fits = spare >= 0
        if fits and not (fills and spare > _ENOUGH * goal.limit):
            return None
        again = self._solved(goal, aim)
        if again is not None:
            is_new = again.seconds < solved.seconds and self._known(again.plan, goal.limit) is None
            return aim if is_new or not fits else None
        if fits:
            return None
        # the allocator takes from each plan another number of bytes for itself: one in between may fit
        least = self.space.least(goal.level, self.most_squared_error)
        return None if least is None or least.peak >= solved.peak else (least.peak + solved.peak) / 2

    def _known(self, plan: Plan, limit: int) -> Found | None:
        """Return the simulation of a plan that says whether it fits: within this limit, or one that it keeps anyway."""
        for each in self.found:
            decides = each.limit == limit or each.need <= limit or each.measured.peak_bytes > limit
            if each.plan == plan and decides:
                return each
        return None

    def _case_of(self, plan: Plan, limit: int) -> Case:
        return plan.case(self.exact, self.space.blocks.whole).model_copy(update={"memory_limit_bytes": limit})

    def _simulate_plans(self, wanted: Iterable[tuple[Solved, int]]) -> None:
        """Simulate plans within limits, each plan within its smallest limit first: that may tell of the larger ones."""
        asked = sorted(wanted, key=lambda each: each[1])
        while asked:
            asked = [(solved, limit) for solved, limit in asked if self._is_open(solved.plan, limit)]
            now = {solved.plan: (solved, limit) for solved, limit in reversed(asked)}
            cases = {self._case_of(plan, limit): solved for plan, (solved, limit) in now.items()}
            self._predicted.update(cases)
            left = {case: solved.plan for case, solved in cases.items() if not self._joined(case, solved)}
            if self._traces_left > 0 or not self._joins.has_traces:
                self.measured(left)
                self._traces_left -= len(left)
            if not self.outcomes.keys() & cases.keys():
                return  # the time is over

    def _joined(self, case: Case, solved: Solved) -> bool:
        """Join a plan; return whether it can be."""
        if case in self.outcomes:
            return True
        limit, before = case.memory_limit_bytes or 0, len(self.outcomes)
        self._joins.is_simulating = self._traces_left > 0
        is_joining = self.is_joining and not self.space.blocks.are_changed_with(solved.plan.rest)
        measured = self._joins.step(solved.plan, limit) if is_joining else None
        self._traces_left -= len(self.outcomes) - before
        if measured is None or case in self.outcomes:  # a trace that it needs may be its own
            return measured is not None
        self.outcomes[case] = measured
        self.found.append(Found(solved.plan, case, limit, measured, solved, is_joined=True))
        self.note(case, solved.plan, measured)
        return True

    def prove(self, cases: Iterable[Case]) -> None:
        """Simulate plans whole that were joined."""
        joined = {each.case: each for each in self.found if each.is_joined}
        for found in [joined[case] for case in cases if case in joined]:
            self.found.remove(found)
            del self.outcomes[found.case]
            whole = self.measured({found.case: found.plan}).get(found.case)
            if whole is not None:
                self.errors.append(found.measured.peak_bytes / whole.peak_bytes - 1)
            elif found.case not in self.outcomes:  # the time is over
                self.found.append(found)
                self.outcomes[found.case] = found.measured

    def _is_open(self, plan: Plan, limit: int) -> bool:
        """Whether only a simulation tells whether a plan fits within a limit."""
        is_known = self._case_of(plan, limit) in self.outcomes or self._known(plan, limit) is not None
        return not is_known and plan not in self._impossible

    def measured(self, cases: Mapping[Case, Plan]) -> dict[Case, Measurement]:
        """Simulate cases; those of the whole model are plans, also those that a survey learns from."""
        new = [case for case in cases if case not in self.outcomes]
        measured = super().measured(cases)
        for case in new:
            if case.model != self.exact.model:
                continue
            if is_refusal(self.outcomes.get(case)):
                self._impossible.add(cases[case])
            if case in measured:
                limit = case.memory_limit_bytes or 0
                self.found.append(Found(cases[case], case, limit, measured[case], self._predicted.get(case)))
        return measured

    def _is_of(self, found: Found, goal: Goal) -> bool:
        if goal.uniform and not found.plan.is_uniform:
            return False
        if self.space.errors.of(found.plan) > self.most_squared_error:
            return False
        return goal.level.allows(found.plan.training(found.measured.warnings))
