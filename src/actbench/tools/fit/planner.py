"""Makes plans: solves for the fastest, joins or simulates it, and solves again if it needs other bytes than the sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.report.advice import needed_bytes
from actbench.tools.fit.answer import replaces, worth_showing
from actbench.tools.fit.errors import ErrorMeter
from actbench.tools.fit.join import Joins
from actbench.tools.fit.plan import Plan
from actbench.tools.fit.records import ANY, EXACT, MARGIN, Training, step_seconds_of, to_nine_digits
from actbench.tools.fit.survey import Survey, is_refusal
from actbench.units import format_bytes

BUDGETS = 20
"""How many limits of memory a frontier has a plan for."""

_ROUNDS = 4  # a plan is corrected by its joined or simulated step so often, and the last correction is made, too
_ROOM = 0.01  # share of the least peak that the smallest budget of a frontier has more: the allocator loses some
_MORE_TRACES = 4  # that the plans of frontiers may need beyond those of the answer
_MOST_SIMPLE = 2  # plans that do one thing with some blocks, tried for a goal
_WRONG_SECONDS = 0.0005  # share of a step's time that the sum of its parts is off
_ENOUGH = 0.002  # share of a limit that may be left unused before a plan is corrected
_STEPS = 32  # in bytes, from the fastest plan by its sums to the one that needs least
_WORTH = 0.005  # share of a step's time that a plan between them has to save


@dataclass(frozen=True)
class Goal:
    """The fastest plan of a level within a limit of bytes is wanted.

    Attributes:
        level: The furthest that training may be from the exact step's.
        uniform: Whether it has to do the same with all blocks.
        slowest: Seconds; a plan that takes longer is not worth a simulation.
        shown: Whether a plan is not worth one, either, that an answer leaves out beside those that were found.
    """

    level: Training
    limit: int
    uniform: bool = False
    slowest: float = math.inf
    shown: bool = False


@dataclass(frozen=True)
class Found:
    """A plan that was simulated whole, or joined.

    Attributes:
        limit: Bytes that the simulation allowed.
        is_joined: Whether it was joined from traces, and not simulated whole.
    """

    plan: Plan
    case: Case
    limit: int
    measured: Measurement
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
        knows_least: Whether the plan of each level that needs least was simulated.
        is_joining: Whether plans are joined where their traces are known; otherwise all are simulated whole.
        note: Told of each plan that was joined.
        is_over: Whether the time is over.
        errors: Of plans that were joined and then simulated whole: shares of the peak that the joined one was off.
    """

    found: list[Found] = field(default_factory=list)
    knows_least: bool = False
    is_joining: bool = True
    note: Callable[[Case, Plan, Measurement], object] = lambda case, plan, measured: None
    is_over: Callable[[], bool] = lambda: False
    errors: list[float] = field(default_factory=list)
    _joins: Joins = field(init=False, repr=False)
    _traces_left: float = field(default=math.inf, repr=False)  # that may be simulated to join plans
    _impossible: set[Plan] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        """Join plans from what the survey simulates."""
        self._joins = Joins(self)

    def limit_error(self, most: float) -> None:
        """Measure errors of the gradient, and make plans that have at most this one.

        Call it before plans are made.
        """
        exact = self.known([self.exact])[self.exact]
        blocks = replace(self.space.blocks, copy=None) if self.space.blocks.is_thinned else self.space.blocks
        meter = ErrorMeter(self.exact, exact.weights_bytes, blocks, self.simulate)
        self.space.know(meter.run(*self.space.inexact()), (most / MARGIN) ** 2)

    # -- what was found -----------------------------------------------------------------------------------------------

    @property
    def exact_step(self) -> Found:
        """The exact step, once it was simulated."""
        return next(each for each in self.found if each.case == self.exact)

    def reaching(self, goal: Goal) -> list[Found]:
        """Return the plans that were found and reach a goal, the fastest first."""
        reach = (
            each
            for each in self.found
            if each.need <= goal.limit
            and (each.plan.is_uniform or not goal.uniform)
            and self.space.errors.of(each.plan) <= self.space.most_squared_error
            and each.plan.training(each.measured.warnings).is_as_near(goal.level)
        )
        return sorted(reach, key=lambda each: (to_nine_digits(each.seconds), len(each.plan.candidates), each.need))

    def fastest(self, goal: Goal) -> Found | None:
        """Return the fastest plan that was found and reaches a goal."""
        return next(iter(self.reaching(goal)), None)

    def best(self, limit: int) -> str:
        """Return the need and the time of the fastest plan within a limit; empty if none but the exact step is."""
        fitting = [each for each in self.found if each.need <= limit and each.case != self.exact]
        found = min(fitting, key=lambda each: each.seconds, default=None)
        return "" if found is None else f"{format_bytes(found.need)}, {found.seconds / self.exact_step.seconds:.2f}x"

    def _known(self, plan: Plan, limit: int) -> Found | None:
        """Return what says whether a plan fits: it was tried within this limit, or within one that it keeps anyway."""
        for each in self.found:
            decides = each.limit == limit or each.need <= limit or each.measured.peak_bytes > limit
            if each.plan == plan and decides:
                return each
        return None

    # -- what is looked for -------------------------------------------------------------------------------------------

    def answer(self, limit: int, levels: Sequence[Training]) -> None:
        """Try the fastest plans within a limit, and what does the same with all blocks; or what needs least."""
        first = [level for level in levels if (level.updates, level.precision) == ("same", "same")]
        goals = [Goal(level, limit) for level in first]
        goals += [Goal(level, limit, uniform=True) for level in levels if level in (EXACT, ANY)]
        self.pursue(goals)
        further = [Goal(level, limit, shown=True) for level in levels if level not in first]
        self.pursue(further)
        goals += further
        self._try((plan, limit) for plan in self._usual)
        is_nothing_found, least = not any(map(self.fastest, goals)), []
        for level in levels:  # what needs least, if nothing of a level fits but this may, or if nothing fits at all
            plan = self.space.least(level) if self.fastest(Goal(level, limit)) is None else None
            if plan is not None and (plan.peak <= limit or is_nothing_found):
                least.append(plan)
        self._try((plan, limit) for plan in least)
        if not any(map(self.fastest, goals)):
            self.knows_least = bool(least) and all(self._known(plan, limit) is not None for plan in least)

    def frontiers(self, levels: Sequence[Training], max_slowdown: float = math.inf) -> None:
        """Join the fastest plans at budgets between the least that is possible and what the exact step needs.

        They are made of what was simulated for the answer, and of a few more traces.

        A plan for a smaller budget that turns out to be faster is that of the larger one, too: no curve can rise. What
        takes more than ``max_slowdown`` times as long as the exact step is left out.
        """
        exact, goals = self.exact_step, list[Goal]()
        for level in levels:
            least = self.space.least(level)
            if least is not None and least.peak < exact.need:
                steps = np.linspace(least.peak * (1 + _ROOM), exact.need, BUDGETS)
                goals += [Goal(level, round(float(budget)), slowest=max_slowdown * exact.seconds) for budget in steps]
        self._traces_left = _MORE_TRACES
        self._correct(goals, rounds=2, fills=False)
        self._traces_left = 0  # one action on all blocks is joined where its trace is there
        blocks, actions = (
            len(self.space.blocks.paths),
            [(way, action) for way in self.space.ways for action in way.actions],
        )
        uniform = (Plan(way.around, (action,) * blocks) for way, action in actions if action and blocks)
        self._try((plan, exact.limit) for plan in uniform if any(plan.training().is_as_near(each) for each in levels))
        self._traces_left, self._joins.is_simulating = math.inf, True

    def pursue(self, goals: Sequence[Goal], rounds: int = _ROUNDS) -> None:
        """Try the plans that reach goals, until what they need is what their parts add up to.

        The allocator loses other bytes with each plan, and a correction by what it lost with one passes over others
        that would fit. So what lies between is joined, and no plan is slower than the best that does one thing with
        some of the blocks.
        """
        self._correct(goals, rounds, fills=True)
        for goal in (each for each in goals if not each.uniform):
            self._step_down(goal)
        wanted: list[tuple[Plan, int]] = []
        for goal in (each for each in goals if not each.uniform and each.level in (EXACT, ANY)):
            best = self.fastest(goal)
            slowest = min(goal.slowest, best.seconds * (1 + _WRONG_SECONDS) if best else math.inf)
            wanted += [
                (plan, goal.limit) for plan in self.space.of_some(goal.level, goal.limit, slowest)[:_MOST_SIMPLE]
            ]
        self._try(wanted)

    def tried(self, plans: Iterable[Plan], limit: int) -> Found | None:
        """Try plans within a limit, and return the fastest that fits."""
        wanted = list(plans)
        self._try((plan, limit) for plan in wanted)
        known = (self._known(plan, limit) for plan in wanted)
        fitting = [each for each in known if each is not None and each.need <= limit]
        return min(fitting, key=lambda each: each.seconds, default=None)

    def _correct(self, goals: Sequence[Goal], rounds: int, *, fills: bool) -> None:
        """Solve for goals, and again for other bytes where plans need more than predicted, or leave some unused.

        Without ``fills`` a plan that leaves some of its limit unused is good enough: on a frontier, the next one has a
        larger limit anyway.
        """
        aims = {goal: float(goal.limit) for goal in goals}
        while aims and rounds:
            asked = {goal: plan for goal, aim in aims.items() if (plan := self._solved(goal, aim))}
            self._try((plan, goal.limit) for goal, plan in asked.items())
            if self._impossible.isdisjoint(asked.values()):  # else nothing was corrected
                rounds -= 1
            next_aims: dict[Goal, float] = {}
            for goal, plan in asked.items():
                aim = self._next_aim(goal, plan, fills=fills)
                if plan in self._impossible:
                    self.space.leave_out(plan, [each.plan for each in self.found])
                    next_aims[goal] = aims[goal]
                elif aim is not None:
                    next_aims[goal] = aim
            aims = next_aims

    def _step_down(self, goal: Goal) -> None:
        """Join plans that need less and less by their sums, until one fits or is no faster than what was found.

        A correction counts on it that the allocator loses as much with the next plan. Beside large logits it may need
        one more segment for them with a plan, and none with the next.
        """
        plan, least, best = self._solved(goal, goal.limit), self.space.least(goal.level), self.fastest(goal)
        if plan is None or least is None or not (self.is_joining and self._joins.has_traces):
            return
        step = max((plan.peak - least.peak) / _STEPS, 1.0)
        slowest = (1 - _WORTH) * best.seconds if best else math.inf
        left, self._traces_left = self._traces_left, 0
        while plan is not None and plan.seconds < slowest and not self.is_over():
            plan = self._solved(goal, plan.peak - step) if self.tried([plan], goal.limit) is None else None
        self._traces_left, self._joins.is_simulating = left, left > 0

    def _solved(self, goal: Goal, aim: float) -> Plan | None:
        """Return the fastest plan of a goal whose parts add up to so many bytes at most."""
        if goal.uniform:
            return self.space.uniform(goal.level, aim)
        plan = self.space.solve(goal.level, aim)
        is_slow = plan is None or plan.seconds > goal.slowest or (goal.shown and self._is_replaced(plan, goal.limit))
        return None if is_slow else plan

    def _is_replaced(self, plan: Plan, limit: int) -> bool:
        """Whether an answer would leave a plan out that takes what its parts add up to, or a little less."""
        most = self.space.most_squared_error
        found = [each for each in self.found if each.need <= limit and self.space.errors.of(each.plan) <= most]
        steps = [(each.plan.training(each.measured.warnings), each.seconds) for each in found]
        own = plan.training(), (1 - _WRONG_SECONDS) * plan.seconds
        return any(replaces(steps[place], own) for place in worth_showing(steps) if found[place].plan != plan)

    def _next_aim(self, goal: Goal, plan: Plan, *, fills: bool) -> float | None:
        """Return the bytes to solve for next, if a plan needs more than was predicted, or much less than the limit."""
        known = self._known(plan, goal.limit)
        if known is None:
            return None
        aim, spare = goal.limit - (known.need - plan.peak), goal.limit - known.need
        fits = spare >= 0
        if fits and not (fills and spare > _ENOUGH * goal.limit):
            return None
        again = self._solved(goal, aim)
        if again is not None:
            is_new = again.seconds < plan.seconds and self._known(again, goal.limit) is None
            return aim if is_new or not fits else None
        # the allocator takes from each plan another number of bytes for itself: one in between may fit
        least = None if fits else self.space.least(goal.level)
        return None if least is None or least.peak >= plan.peak else (least.peak + plan.peak) / 2

    # -- what is simulated --------------------------------------------------------------------------------------------

    def _try(self, wanted: Iterable[tuple[Plan, int]]) -> None:
        """Join or simulate plans within limits, each within its smallest limit first: that may tell of larger ones."""
        asked = sorted(wanted, key=lambda each: each[1])
        if self.is_joining and self._traces_left > 0:
            self._simulate_traces(plan for plan, limit in reversed(asked) if self._known(plan, limit) is None)
        while asked:
            of_limit = {
                (plan, limit): self.whole_case(plan).model_copy(update={"memory_limit_bytes": limit})
                for plan, limit in asked
            }
            asked = [
                (plan, limit)
                for plan, limit in asked
                if of_limit[plan, limit] not in self.outcomes
                and self._known(plan, limit) is None
                and plan not in self._impossible
            ]
            cases = {of_limit[each]: each[0] for each in {each[0]: each for each in reversed(asked)}.values()}
            left = {case: plan for case, plan in cases.items() if not self._joined(case, plan)}
            if self._traces_left > 0 or not self._joins.has_traces:
                self.measured(left)
                self._traces_left -= len(left)
            if not self.outcomes.keys() & cases.keys():
                return  # the time is over

    def _simulate_traces(self, plans: Iterable[Plan]) -> None:
        """Simulate side by side what plans are joined from: the first of them, as far as traces may be simulated."""
        chosen, wanted, before = list[Plan](), dict[Case, Plan](), len(self.outcomes)
        for plan in plans:
            more = wanted | self._joins.missing_setting(plan) | self._joins.missing_actions(plan)
            if len(wanted) < len(more) <= self._traces_left:
                chosen.append(plan)
                wanted = more
        for missing in (self._joins.missing_setting, self._joins.missing_actions):  # which may be fewer than it seemed
            self.measured({case: each for plan in chosen for case, each in missing(plan).items()})
        self._traces_left -= len(self.outcomes) - before

    def _joined(self, case: Case, plan: Plan) -> bool:
        """Join a plan; return whether it can be, or was simulated already."""
        if case in self.outcomes:
            return True
        limit, before = case.memory_limit_bytes or 0, len(self.outcomes)
        self._joins.is_simulating = self._traces_left > 0
        is_joining = self.is_joining and not self.space.blocks.are_changed_with(plan.rest)
        measured = self._joins.step(plan, limit) if is_joining else None
        self._traces_left -= len(self.outcomes) - before
        if measured is not None and case not in self.outcomes:  # a trace that it needs may be its own
            self.outcomes[case] = measured
            self.found.append(Found(plan, case, limit, measured, is_joined=True))
            self.note(case, plan, measured)
        return measured is not None

    def unproved(self, cases: Iterable[Case]) -> list[Found]:
        """Return the plans of cases that were joined from traces of other steps.

        One that changes no block was simulated whole: its own trace was replayed by the allocator within another limit.
        """
        joined = {each.case: each for each in self.found if each.is_joined and each.plan.actions}
        return [joined[case] for case in cases if case in joined]

    def prove(self, plans: Iterable[Found]) -> None:
        """Simulate plans whole that were joined."""
        for found in plans:
            self.found.remove(found)
            del self.outcomes[found.case]
            whole = self.measured({found.case: found.plan}).get(found.case)
            if whole is not None:
                self.errors.append(found.measured.peak_bytes / whole.peak_bytes - 1)
            elif found.case not in self.outcomes:  # the time is over
                self.found.append(found)
                self.outcomes[found.case] = found.measured

    def _simulate(self, cases: Mapping[Case, Plan]) -> None:
        """Simulate cases; those of the whole model are plans, also those that a survey learns from."""
        new = [case for case in cases if case not in self.outcomes]
        super()._simulate(cases)
        for case in (case for case in new if case.model == self.exact.model):
            outcome = self.outcomes.get(case)
            if is_refusal(outcome):
                self._impossible.add(cases[case])
            if isinstance(outcome, Measurement):
                self.found.append(Found(cases[case], case, case.memory_limit_bytes or 0, outcome))
