"""Learns what each change does to a step: a survey of single changes, before a plan is made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Final, TypeVar

import numpy as np

from actbench.errors import MeasurementError
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure
from actbench.report.advice import needed_bytes
from actbench.scheme.base import SAVED_TENSORS
from actbench.simulator import profiles
from actbench.simulator.cost.clock import estimate
from actbench.simulator.profiles import DeviceProfile
from actbench.simulator.trace import Trace
from actbench.tools.fit.answer import USUAL
from actbench.tools.fit.costs import AROUND, COPIES, Blocks, Costs, Effect, Floats, Way, change_in_parts
from actbench.tools.fit.errors import Simulate
from actbench.tools.fit.plan import AS_IT_IS, Action, Candidate, Candidates, Plan, stand_together, training_of
from actbench.tools.fit.records import ANY, step_seconds_of
from actbench.tools.fit.solver import Point, lower_hull
from actbench.tools.fit.space import Space
from actbench.workload.names import with_blocks

LEAST_SHARE: Final = 0.02
"""The smallest share of a step's bytes or seconds that is worth a change."""

_LEAST_SECONDS = 0.005  # share of a step's time that its optimizer takes, from which on a faster one is tried
_MOST_PARTS = 8  # numbers of micro-batches
_MOST_WAYS = 4  # of computing, beyond the first
_LOST = 0.02  # share of a limit that the allocator may lose in a step, beyond what copies of a model say
_ALIKE = 1.05  # times the bytes or seconds of another way; less is no reason to look at both

Item = TypeVar("Item")


def is_refusal(outcome: Outcome | None) -> bool:
    """Return whether a case cannot be simulated; one that crashed or ran out of time may be, the next time."""
    return isinstance(outcome, Failure) and outcome.reason not in ("timeout", "crash")


@dataclass
class Survey:
    """What was learned of a model's step.

    Attributes:
        exact: The case of the exact step.
        candidates: What may be changed.
        simulate: Simulates cases.
        space: What plans are made of, once :meth:`run` has ended.
        outcomes: Of all cases that were simulated, in order.
        refused: Why single candidates cannot be.
    """

    exact: Case
    candidates: Candidates
    simulate: Simulate
    space: Space = field(default_factory=lambda: Space(Blocks()))
    outcomes: dict[Case, Outcome] = field(default_factory=dict)
    refused: dict[Candidate, Outcome] = field(default_factory=dict)
    _cut_changes: dict[Action, tuple[int, Costs]] = field(default_factory=dict, repr=False)
    _usual: list[Plan] = field(default_factory=list, repr=False)  # that are joined from what :meth:`begin` simulates
    _ahead: Iterator[Mapping[Case, Plan]] = field(default_factory=lambda: iter(()), repr=False)
    _unbeaten: list[Action] = field(default_factory=list, repr=False)  # other ways, in copies

    @property
    def profile(self) -> DeviceProfile:
        """The device."""
        return profiles.get(self.exact.device_profile or profiles.DEFAULT)

    def run(self) -> None:
        """Learn all, by :meth:`start`, :meth:`begin` and :meth:`look_further`; errors are those of :meth:`start`."""
        self.start()
        self.begin()
        self.look_further()

    def start(self) -> None:
        """Simulate the exact step, and find its blocks.

        Raises:
            MeasurementError: The exact step cannot be simulated.
        """
        exact = self.measured({self.exact: Plan()}).get(self.exact)
        if exact is None:
            failure = self.outcomes.get(self.exact)
            why = getattr(failure, "message", "the time ended before that: give a larger --budget")
            raise MeasurementError(f"the exact step cannot be simulated: {why}")
        found = self.candidates.suited(self.exact, exact)
        self.space.blocks = Blocks.of(exact.blocks)
        if not self.space.blocks.paths:  # what is done with blocks is then done with the model
            found = replace(found, around=[*found.around, *found.of_blocks], of_blocks=())
        self.candidates = found
        self._ahead = self._stages()

    def try_usual(self) -> None:
        """Simulate the usual stacks of which all schemes may be chosen, unless a short copy will tell of its step."""
        exact = self.known([self.exact])[self.exact]
        known = {each.name: each for each in self.candidates.all if _matters(each, exact)}
        plans = []
        for stack in USUAL:
            if known.keys() >= set(stack):
                chosen = frozenset(known[name] for name in stack)
                action = chosen.intersection(self.candidates.of_blocks)
                plans.append(Plan(chosen - action, (action,) * len(self.space.blocks.paths) if action else ()))
        has_copy = self._shortened() is not None
        self._usual = [plan for plan in plans if has_copy and not plan.around]
        self.measured({self.whole_case(plan): plan for plan in plans if plan not in self._usual})

    def begin(self) -> None:
        """Simulate each change alone; then combinations that promise to save more for less."""
        self._find_copy()
        first = self._way(AS_IT_IS)
        if first is None:
            self._ahead = iter(())
            return
        if self.space.blocks.paths:
            self._learn(first, _compounds(first))
            _keep_near_hull(first)
            self._learn_rest(first)
        self._cut(first)

    def look_further(self, limit: float = 0.0) -> None:
        """Learn the same of other ways of computing: other precisions, memory formats, adapters.

        Plans of those of which there is no frontier are only wanted within ``limit`` bytes: where a step fits as it is,
        only what makes it faster is simulated, and of ways that fit only the fastest. 0 is for any limit.
        """
        if not self.space.ways:
            return
        first, *cuts = self.space.ways
        self._ahead = iter(())
        for stage in self._stages():  # all of them: the time may have ended for those that were simulated ahead
            self._simulate(stage)
        chosen, others = self._worth_a_look(limit)
        for around, fits in chosen.items():
            way = self._way(around, among=_best(first), only_faster=first if fits else None)
            if way is None:
                continue
            for cut in cuts:
                if self._go_with(cut.around, around):
                    (each,) = cut.around
                    slower = cut.exact.total_seconds / first.exact.total_seconds
                    self._add_parts(way, each, cut.parts, way.exact.cut(cut.parts, slower))
        for around in others:  # they may be a plan as they are
            costs, outcome = self._costs(around), self.outcomes.get(self._cases(around)[0])
            if costs is not None and isinstance(outcome, Measurement):
                blocks = replace(self.space.blocks, copy=None) if self.space.blocks.is_thinned else self.space.blocks
                unchanged = Effect.of(outcome, outcome, blocks)
                if unchanged is not None or not blocks.paths:
                    self.space.ways.append(Way(around, 1, costs, actions={AS_IT_IS: unchanged} if unchanged else {}))

    # -- what is simulated --------------------------------------------------------------------------------------------

    def measured(self, cases: Mapping[Case, Plan]) -> dict[Case, Measurement]:
        """Simulate what was not simulated yet; return the measurements among the outcomes of all.

        What is certain to be wanted next is simulated beside it, so that no processor waits for the last one.
        """
        new = {case: plan for case, plan in cases.items() if case not in self.outcomes}
        if new:
            self._simulate({**new, **next(self._ahead, {})})
        return self.known(cases)

    def _simulate(self, cases: Mapping[Case, Plan]) -> None:
        self.outcomes.update(self.simulate({case: plan for case, plan in cases.items() if case not in self.outcomes}))

    def known(self, cases: Iterable[Case]) -> dict[Case, Measurement]:
        """Return the measurements of those cases that were simulated."""
        return {case: found for case in cases if isinstance(found := self.outcomes.get(case), Measurement)}

    def whole_case(self, plan: Plan) -> Case:
        """Return the case of a plan for the whole model."""
        return plan.case(self.exact, self.space.blocks.whole)

    def action_case(self, around: Action, action: Action, rest: Action = AS_IT_IS) -> tuple[Case, Plan]:
        """Return the case of an action on all blocks, of the copy if there is one, and perhaps on the rest of it."""
        blocks = self.space.blocks
        plan = Plan(around, (action,) * len(blocks.part.blocks) if action else (), rest)
        return plan.case(self._exact_of(blocks.copy or self.exact.model), blocks.part), plan

    def _exact_of(self, model: str) -> Case:
        return self.exact.model_copy(update={"model": model})

    def _find_copy(self) -> None:
        """Simulate a copy with few blocks, and use it if its blocks are those of the model."""
        found = self._shortened()
        if found is None or found.copy is None:
            return
        case = self._exact_of(found.copy)
        copy = self.measured({case: Plan()}).get(case)
        if copy is None or copy.blocks is None or not found.is_told_by(copy.blocks):
            return
        found = replace(found, copied=tuple(block.path for block in copy.blocks.blocks))
        # blocks of equal parameters may do different things, or others may follow them: a pooling behind a stage
        if not found.is_thinned or self._does_what_the_model_does(copy, found):
            self.space.blocks = found

    def _shortened(self) -> Blocks | None:
        """Return the blocks with a copy that has few of them; None if there can be none."""
        return self.space.blocks.shortened(self.exact.model) if self.exact.script is None else None

    def _does_what_the_model_does(self, copy: Measurement, blocks: Blocks) -> bool:
        """Whether each block of the model does what the one of a copy that stands for it does."""
        exact = self.known([self.exact])[self.exact]
        if copy.trace is None or exact.trace is None:
            return False
        grown = Trace.unpacked(copy.trace).repeated(blocks.paths, blocks.places)
        return grown is not None and grown.of_blocks() == Trace.unpacked(exact.trace).of_blocks()

    def _seconds(self, copy: Measurement) -> Floats:
        """Return the time of each block of the model, from the trace of a copy without some of them.

        Copies to host memory wait for those of the blocks before, so that a block takes longer among more.
        """
        blocks, profile = self.space.blocks, self.profile
        grown = Trace.unpacked(copy.trace).repeated(blocks.paths, blocks.places) if copy.trace else None
        told = Costs.of(copy)
        if grown is None or profile.rates is None:
            return told.at(blocks.places).seconds if told is not None else np.zeros(len(blocks.paths))
        labels = [label for label, segment in grown.segments.items() for _ in segment.operators]
        done = [grown.operators[place] for segment in grown.segments.values() for place in segment.operators]
        passed = [0.0]
        estimate(done, profile.rates, profile.efficiencies, asynchronous=profile.is_cuda, passed=passed)
        seconds = np.zeros(len(blocks.paths))
        for label, (begun, ended) in zip(labels, itertools.pairwise(passed), strict=True):
            seconds[label.block] += (ended - begun) * (label.block >= 0)
        return seconds

    # -- one way of computing -----------------------------------------------------------------------------------------

    def _way(
        self, around: Action, among: Collection[Action] | None = None, only_faster: Way | None = None
    ) -> Way | None:
        """Learn what changes do in one way of computing; None if that cannot be simulated.

        Changes that make no step faster in the way ``only_faster`` are left out.
        """
        start, exact = self._simulated_around(around)
        whole = self.outcomes[self.exact] if not around else None
        start = whole if isinstance(whole, Measurement) else start
        if start is None or exact is None:
            self._note(around, self._cases(around)[0])
            return None
        is_other = any("precision" in each.changes for each in around)  # in which more may be possible
        wanted = [
            frozenset({each})
            for each in self.candidates.around
            if (is_other or not is_refusal(self.refused.get(each)))
            and self._go_with([each], around)
            and _matters(each, start)
        ]
        known = self._optimizers_in(start)
        tried = [AS_IT_IS, *(frozenset({each}) for each in self.candidates.of_blocks)] if among is None else among
        tried = [each for each in tried if self._go_with(each, around)]
        if only_faster is not None:
            tried = [AS_IT_IS, *_quickest({each: only_faster.actions[each].block_seconds for each in tried})]
            there = {each: costs.total_seconds for each, costs in only_faster.changes.items() if each in wanted}
            # what did not matter there may do so in a faster step
            wanted = [*_quickest(there), *(each for each in wanted if each not in there)]
        changes = [each for each in wanted if each not in known]
        # blocks first: with them plans can be made, should the time end before the rest is known
        self._simulate_around(
            [around | change for change in changes], before=[*map(partial(self.action_case, around), tried)]
        )
        for change in changes:
            self._note(change, self._cases(around | change)[0])
            costs = self._costs(around | change)
            if costs is not None:
                known[change] = costs - exact
        way = Way(around, 1, Costs.of(whole) or exact, {each: known[each] for each in wanted if each in known})
        self._learn(way, tried)
        if self.space.blocks.paths and AS_IT_IS not in way.actions:
            return None  # time ended, or the copy cannot do what the model can: nothing is known of its blocks
        self.space.ways.append(way)
        return way

    def _simulated_around(self, around: Action, parts: int = 1) -> tuple[Measurement | None, Costs | None]:
        """Simulate a step with changes around the blocks; return a measurement and the costs of the whole model."""
        self._simulate_around([around])
        last = self._cases(around)[-1]
        return self.known([last]).get(last), self._costs(around, parts)

    def _simulate_around(self, several: Iterable[Action], before: Iterable[tuple[Case, Plan]] = ()) -> None:
        """Simulate steps with changes around the blocks, each in the larger copy only if the smaller one can be."""
        cases = {around: self._cases(around) for around in several}
        self.measured(dict(before) | {few: Plan(around) for around, (few, *_) in cases.items()})
        possible = {around: more for around, (few, *more) in cases.items() if self.known([few])}
        self.measured({case: Plan(around) for around, more in possible.items() for case in more})

    def _cases(self, around: Action) -> list[Case]:
        """Return what tells of changes around the blocks: two copies of a deep model, or else the model itself."""
        model, blocks = self.exact.model, self.space.blocks
        models = [with_blocks(model, count) for count in COPIES] if blocks.grows else [model]
        return [Plan(around).case(self._exact_of(name), blocks.part) for name in models]

    def _costs(self, around: Action, parts: int = 1) -> Costs | None:
        """Return the costs of the whole model, with changes around the blocks that were simulated."""
        few, *more = (Costs.of(self.outcomes.get(case), parts) for case in self._cases(around))
        if few is None or None in more:
            return None
        return few.at(self.space.blocks.places).towards(more[0], self._steps, AROUND) if more and more[0] else few

    @property
    def _steps(self) -> float:
        """How many times the step from one copy to the other leads to the whole model."""
        return (len(self.space.blocks.paths) - COPIES[0]) / (COPIES[1] - COPIES[0])

    def _optimizers_in(self, start: Measurement) -> dict[Action, Costs]:
        """Return what optimizers do, as learned in ways of computing with the same bytes of state and gradients."""
        bytes_of = attrgetter("weights_bytes", "gradients_bytes", "optimizer_bytes")
        found: dict[Action, Costs] = {}
        for way in self.space.ways:
            other = self.outcomes.get(self._cases(way.around)[-1])
            if way.parts == 1 and isinstance(other, Measurement) and bytes_of(other) == bytes_of(start):
                alone = (each for each in way.changes if all(one.changes == ("optimizer",) for one in each))
                found |= {each: way.changes[each] for each in alone}
        return found

    def _learn(self, way: Way, more: Iterable[Action]) -> None:
        """Simulate actions where that was not done, and note their effects."""
        told = {action: self.action_case(way.around, action) for action in more}
        found = self.measured(dict(told.values()))
        before = self.outcomes.get(self.action_case(way.around, AS_IT_IS)[0])
        if not isinstance(before, Measurement):
            return
        for action, (case, _) in told.items():
            self._note(action, case)
            effect = Effect.of(before, found[case], self.space.blocks) if case in found else None
            if effect is not None and self.space.blocks.is_thinned:
                seconds = self._seconds(found[case]) - self._seconds(before)
                effect = replace(effect, costs=replace(effect.costs, seconds=seconds))
            if effect is not None and (not action or effect.is_felt):
                way.actions[action] = effect

    def _learn_rest(self, way: Way) -> None:
        """Learn what single actions do outside of the blocks, and in which modules."""
        singles = [each for each in _best(way) if len(each) == 1 and not _recomputes(each)]
        told = {action: self.action_case(way.around, action, action) for action in singles}
        found = self.measured(dict(told.values()))
        blocks = tuple(f"{path}." for path in self.space.blocks.part.blocks)
        for action, (case, _) in told.items():
            costs = Costs.of(found.get(case))
            before = Costs.of(self.outcomes[self.action_case(way.around, action)[0]])
            if costs is not None and before is not None:
                paths = dict.fromkeys(site.path for site in found[case].sites if not site.path.startswith("("))
                (candidate,) = action
                self.space.blocks.rest[candidate] = tuple(path for path in paths if not f"{path}.".startswith(blocks))
                rest = (costs - before).of_rest().at(self.space.blocks.places)
                way.actions[action] = replace(way.actions[action], rest=rest)

    def _note(self, change: Action, case: Case) -> None:
        """Note the warnings of a single change, or why it was refused."""
        outcome = self.outcomes.get(case)
        if len(change) == 1 and outcome is not None:
            (candidate,) = change
            if isinstance(outcome, Measurement):
                self.space.warnings.setdefault(candidate, outcome.warnings)
            elif candidate not in self.space.warnings:  # else it is possible, but not beside what it stood with here
                self.refused.setdefault(candidate, outcome)

    @staticmethod
    def _go_with(action: Iterable[Candidate], around: Action) -> bool:
        return all(one.stands_with(other) for one, other in itertools.product(action, around))

    # -- micro-batches, and other ways of computing -------------------------------------------------------------------

    def _cut(self, way: Way) -> None:
        """Learn of the same way of computing in micro-batches, down to those that hold next to nothing.

        Only the fewest are simulated: what belongs to samples shrinks with the micro-batch, and each one more takes the
        same time more.
        """
        wanted = self._parts_for(way.exact)
        for fewest, count in wanted.items():
            around = way.around | {fewest}
            _, exact = self._simulated_around(around, count)
            self._note(frozenset({fewest}), self._cases(around)[0])
            if exact is None:
                continue
            # what matters between the passes is simulated in the fewest micro-batches, too
            least = LEAST_SHARE * way.exact.peak
            tops = [change for change, costs in way.changes.items() if abs(costs.top) >= least]
            tops = [change for change in tops if self._go_with(change, around)]
            self._simulate_around(around | change for change in tops)
            for change in tops:
                if (costs := self._costs(around | change, count)) is not None:
                    self._cut_changes[change] = count, costs - exact
            for each, parts in wanted.items():
                if parts >= count:
                    told = (text.replace(fewest.name, each.name, 1) for text in self.space.warnings.get(fewest, ()))
                    self.space.warnings.setdefault(each, tuple(told))
                    self._add_parts(way, each, parts, way.exact.in_more_parts(parts, count, exact))
            return

    def _parts_for(self, exact: Costs) -> dict[Candidate, int]:
        """Return the micro-batches that are worth a look, by what the blocks of the exact step hold."""
        held = exact.held.sum()
        few = self.candidates.in_parts[:_MOST_PARTS]
        return {each: parts for parts, each in few if held >= LEAST_SHARE * parts * (exact.base + held)}

    def _add_parts(self, way: Way, candidate: Candidate, parts: int, exact: Costs) -> None:
        around = way.around | {candidate}
        changes = {
            each: change_in_parts(costs, parts, self._cut_changes.get(each))
            for each, costs in way.changes.items()
            if self._go_with(each, around)
        }
        acting = {each: effect.in_parts(parts) for each, effect in way.actions.items()}
        self.space.ways.append(Way(around, parts, exact, changes, acting))

    def _stages(self) -> Iterator[Mapping[Case, Plan]]:
        """Yield what is certain to be simulated, each time what is known to be so by then.

        Copies; micro-batches and other ways of computing, alone and then together, of which those are looked at in the
        larger copy that no other one beats in the smaller one.
        """
        copies = self._shortened()
        models = [] if copies is None else [copies.copy, *([with_blocks(self.exact.model, COPIES[1])] * copies.grows)]
        yield {self._exact_of(model): Plan() for model in models if model is not None}
        exact = Costs.of(self.outcomes[self.exact])
        fewest = [frozenset({each}) for each in (self._parts_for(exact) if exact is not None else ())][:1]
        kinds: dict[object, list[Candidate]] = {}
        for each in self.candidates.computing:
            kinds.setdefault(each.changes, []).append(each)
        stacks = itertools.product(*([None, *alternatives] for alternatives in kinds.values()))
        actions = [frozenset(each for each in stack if each is not None) for stack in stacks]
        others = sorted((each for each in actions if each and stand_together(each)), key=len)
        alone = [each for each in others if len(each) == 1]
        yield {self._cases(around)[0]: Plan(around) for around in (*fewest, *alone)}
        for around in alone:
            self._note(around, self._cases(around)[0])
        ways = [AS_IT_IS, *(each for each in others if not any(is_refusal(self.refused.get(one)) for one in each))]
        larger = {self._cases(around)[-1]: Plan(around) for around in fewest if self.known([self._cases(around)[0]])}
        yield larger | {self._cases(around)[0]: Plan(around) for around in ways}
        in_copy = {
            around: (step_seconds_of(step) or math.inf, float(needed_bytes(step)))
            for around in ways
            for step in self.known([self._cases(around)[0]]).values()
        }
        self._unbeaten = [each for each in in_copy if not each or not _is_beaten(each, in_copy, alike=1.0)]
        yield {self._cases(around)[-1]: Plan(around) for around in self._unbeaten}

    def _worth_a_look(self, limit: float) -> tuple[dict[Action, bool], list[Action]]:
        """Return the other ways of computing that nothing beats that trains as near to the exact step; and the rest.

        Each of the first comes with whether it fits into ``limit`` as it is, and no plan is wanted that needs less.
        """
        needs: dict[Action, tuple[float, float]] = {}
        for around in self._unbeaten:
            costs = self._costs(around)
            if costs is not None:
                one, *more = map(needed_bytes, self.known(self._cases(around)).values())
                needs[around] = costs.total_seconds, one + (self._steps * (more[0] - one) if more else 0)
        enough = {each: 0.0 if training_of(each).is_as_near(ANY) else (1 - _LOST) * limit for each in needs}
        unbeaten = [each for each in needs if each and not _is_beaten(each, needs, enough[each])][:_MOST_WAYS]
        chosen = {each: needs[each][1] <= enough[each] for each in unbeaten}
        return chosen, [each for each in needs if each and each not in chosen]


def _is_beaten(
    around: Action, needs: Mapping[Action, tuple[float, float]], enough: float = 0.0, alike: float = _ALIKE
) -> bool:
    """Whether another way that trains as near is about as fast and as small, or needs no more than ``enough`` bytes.

    Of equal ways that train as near the one with the least product of both is kept, and of these the first.
    """
    capped = {each: (seconds, max(need, enough)) for each, (seconds, need) in needs.items()}
    places, mine, training = list(capped), capped[around], training_of(around)
    return any(
        training_of(other).is_as_near(training)
        and all(one <= alike * two for one, two in zip(its, mine, strict=True))
        and (
            training_of(other) != training
            or (math.prod(its), places.index(other)) < (math.prod(mine), places.index(around))
        )
        for other, its in capped.items()
        if other != around
    )


def _quickest(seconds: Mapping[Action, float]) -> list[Action]:
    """Return the changes that make a step faster, without those that a faster one replaces which trains as near."""
    kept = list[Action]()
    for each in sorted((each for each, more in seconds.items() if more < 0), key=seconds.__getitem__):
        if not any(training_of(other).is_as_near(training_of(each)) for other in kept):
            kept.append(each)
    return kept


def _matters(candidate: Candidate, exact: Measurement) -> bool:
    """Whether what is changed is large enough a part of a step: optimizer state and gradients may not be."""
    if not {"optimizer", "gradients"}.issuperset(candidate.changes):
        return True
    state = (exact.optimizer_bytes or 0) * (candidate.optimizer is None)  # another one has the same state
    state += (exact.gradients_bytes or 0) * ("gradients" in candidate.changes)
    seconds = exact.estimated.optimizer_seconds / exact.estimated.step_seconds if exact.estimated else 0.0
    is_faster = candidate.optimizer is not None and seconds >= _LEAST_SECONDS
    return is_faster or state / exact.peak_bytes >= LEAST_SHARE


# -- which actions are worth it: those near the lower hull of what all blocks hold and take --------------------------

_MOST_ACTIONS = 10  # that a plan is made of
_MOST_COMPOUNDS = 10  # that are simulated
_MOST_TOGETHER = 4  # single actions in a compound one
_MOST_SINGLES = 12  # near the hull, of which compounds are made
_SLACK = 0.02  # share of the hull's seconds that a compound may be above it, to be simulated
_MOST_EXACT, _MOST_OTHERS = 3, 5  # that another way of computing looks at


def near_hull(points: Mapping[Item, Point], most: int, slack: float = 0.0) -> list[Item]:
    """Return the items on the lower hull, and the next nearest to it, ``most`` in all or those within ``slack`` of it.

    Nearness is the share of the hull's seconds, above the fastest point, that an item takes more for its bytes.
    """
    corners = lower_hull(points.values())
    if not corners:
        return []

    def on_hull(held: float) -> float:
        """Return the least seconds with which so many bytes are held, between the corners."""
        if held >= corners[-1][0]:
            return corners[-1][1]
        for (less, slow), (more, fast) in itertools.pairwise(corners):
            if less <= held <= more:
                return slow + (fast - slow) * (held - less) / (more - less)
        return corners[0][1]

    span = max(corners[0][1] - corners[-1][1], 1e-12)
    gaps = {item: (seconds - on_hull(held)) / span for item, (held, seconds) in points.items()}
    nearest = sorted(points, key=lambda item: gaps[item])
    return nearest[: max(most, sum(gap <= slack for gap in gaps.values()))]


def _points(way: Way) -> dict[Action, Point]:
    """Return the bytes and seconds of all blocks, by action."""
    held, seconds = float(way.exact.held.sum()), float(way.exact.seconds.sum())
    return {
        action: (held + float(effect.costs.held.sum()), seconds + effect.block_seconds)
        for action, effect in way.actions.items()
    }


def _exact(points: Mapping[Action, Point]) -> dict[Action, Point]:
    return {action: point for action, point in points.items() if training_of(action).is_exact}


def _recomputes(action: Action) -> bool:
    return any(each.recomputes for each in action)


def _compounds(way: Way) -> list[Action]:
    """Return actions that do several things with a block, where what they should do together is near the hull.

    Effects add up. A recomputed block saves only its input, on which packing acts as on all saved tensors.
    """
    points = _points(way)
    predicted, (all_held, quick) = dict(points), points[AS_IT_IS]
    near = [action for action in near_hull(points, _MOST_SINGLES) if action]
    packing = [
        action
        for action in points
        if action and all(each.scheme is not None and SAVED_TENSORS in each.scheme.claims for each in action)
    ]
    for again, other in itertools.product(filter(_recomputes, near), packing):
        if stand_together(again | other):
            (held, slow), (packed, slower) = points[again], points[other]
            share = held / max(all_held, 1.0)
            predicted[again | other] = share * packed, slow + share * (slower - quick)
    others = [action for action in near if not _recomputes(action)]
    for several in itertools.chain(*(itertools.combinations(others, count) for count in range(2, _MOST_TOGETHER + 1))):
        action = AS_IT_IS.union(*several)
        if stand_together(action):
            held = all_held + sum(points[each][0] - all_held for each in several)
            predicted[action] = max(0.0, held), quick + sum(points[each][1] - quick for each in several)
    nearest = [*near_hull(_exact(predicted), 0, slack=_SLACK), *near_hull(predicted, 0, slack=_SLACK)]
    return [action for action in dict.fromkeys(nearest) if action not in points][:_MOST_COMPOUNDS]


def _keep_near_hull(way: Way) -> None:
    """Drop all actions but those near the hull, of exact and of other gradients."""
    points: dict[Action, Point] = {}
    for action, point in sorted(_points(way).items(), key=lambda each: len(each[0])):
        if point not in points.values():  # of several that do the same, the one of fewest parts
            points[action] = point
    kept = {AS_IT_IS, *near_hull(points, _MOST_ACTIONS), *near_hull(_exact(points), _MOST_ACTIONS // 2)}
    way.actions = {action: effect for action, effect in way.actions.items() if action in kept}


def _best(way: Way) -> list[Action]:
    """Return the few actions nearest to the hull."""
    points = _points(way)
    return list(dict.fromkeys((AS_IT_IS, *near_hull(_exact(points), _MOST_EXACT), *near_hull(points, _MOST_OTHERS))))
