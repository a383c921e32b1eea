"""Learns what each change does to a step: a survey of single changes, before a plan is made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from actbench.errors import MeasurementError
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case
from actbench.report.advice import needed_bytes
from actbench.tools.fit import actions
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.choices import Choices
from actbench.tools.fit.costs import Costs
from actbench.tools.fit.counts import is_refusal
from actbench.tools.fit.effects import LEAST_SHARE, Blocks, Effects, change_in_parts, effect_of, matters, of_optimizers
from actbench.tools.fit.errors import Simulate
from actbench.tools.fit.plan import AS_IT_IS, Action, Around, Plan
from actbench.tools.fit.records import step_seconds_of
from actbench.tools.fit.space import Space

_MOST_PARTS = 8  # numbers of micro-batches
_MOST_WAYS = 4  # of computing, beyond the first


@dataclass
class Survey:
    """What was learned of a model's step.

    Attributes:
        exact: The case of the exact step.
        choices: What may be changed.
        simulate: Simulates cases.
        space: What plans are made of, once :meth:`run` has ended.
        outcomes: Of all cases that were simulated, in order.
    """

    exact: Case
    choices: Choices
    simulate: Simulate
    space: Space = field(default_factory=lambda: Space(Blocks()))
    outcomes: dict[Case, Outcome] = field(default_factory=dict)
    refused: dict[Choice, Outcome] = field(default_factory=dict)
    _in_parts: dict[Around, tuple[int, Costs]] = field(default_factory=dict, repr=False)

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
        self.choices = self.choices.suited(self.exact, exact)
        self.space.blocks = Blocks.of(exact.blocks)
        if not self.space.blocks.paths:  # what is done with blocks is then done with the model
            choices = self.choices
            self.choices = replace(choices, around=[*choices.around, *choices.of_blocks], of_blocks=())

    def begin(self) -> None:
        """Simulate each change alone; then combinations that promise to save more for less."""
        self._find_copy()
        first = self._way(frozenset())
        if first is None:
            return
        if self.space.blocks.paths:
            self._learn(first, actions.promising(first))
            actions.drop(first)
            self._learn_rest(first)
        self._cut(first)

    def look_further(self) -> None:
        """Learn the same of other ways of computing: other precisions, memory formats, adapters."""
        first = self.space.ways[0] if self.space.ways else None
        if first is None:
            return
        for around in self._worth_a_look(first):
            found = self._way(around, among=actions.best(first))
            if found is not None:
                self._spread(found, first)

    # -- what is simulated ------------------------------------------------------------------------------------------

    def measured(self, cases: Mapping[Case, Plan]) -> dict[Case, Measurement]:
        """Simulate what was not simulated yet; return the measurements among the outcomes of all."""
        todo = {case: plan for case, plan in cases.items() if case not in self.outcomes}
        self.outcomes.update(self.simulate(todo))
        return self.known(cases)

    def known(self, cases: Iterable[Case]) -> dict[Case, Measurement]:
        """Return the measurements of those cases that were simulated."""
        return {case: found for case in cases if isinstance(found := self.outcomes.get(case), Measurement)}

    def _find_copy(self) -> None:
        """Simulate a copy with few blocks, and use it if its blocks are those of the model."""
        model = self.space.blocks.copy_of(self.exact.model) if self.exact.script is None else None
        if model is None:
            return
        case = self.exact.model_copy(update={"model": model})
        copy = self.measured({case: Plan()}).get(case)
        read = copy.blocks if copy is not None else None
        if read is not None and self.space.blocks.is_told_by(read):
            paths = tuple(block.path for block in read.blocks)
            self.space.blocks = replace(self.space.blocks, copy=model, copied=paths)

    def whole_case(self, plan: Plan) -> Case:
        """Return the case of a plan for the whole model."""
        return plan.case(self.exact, self.space.blocks.whole)

    def surveyed(self) -> list[Around]:
        """Return the ways of computing that were looked at."""
        return [way.around for way in self.space.ways]

    def _around_case(self, around: Around) -> Case:
        return self.whole_case(Plan(around))

    def _around_cases(self, several: Iterable[Around]) -> dict[Case, Plan]:
        return {self._around_case(around): Plan(around) for around in several}

    def action_case(self, around: Around, action: Action, rest: Action = AS_IT_IS) -> tuple[Case, Plan]:
        """Return the case of an action on all blocks, of the copy if there is one, and perhaps on the rest of it."""
        blocks = self.space.blocks
        places = blocks.part
        plan = Plan(around, (action,) * len(places.blocks) if action else (), rest)
        exact = self.exact.model_copy(update={"model": blocks.copy}) if blocks.copy else self.exact
        return plan.case(exact, places), plan

    # -- one way of computing ---------------------------------------------------------------------------------------

    def _way(self, around: Around, among: Collection[Action] | None = None) -> Effects | None:
        """Learn what changes do in one way of computing; None if that cannot be simulated."""
        case = self._around_case(around)
        start = self.measured({case: Plan(around)}).get(case)
        exact = Costs.of(start)
        if start is None or exact is None:
            self._note(around, case)
            return None
        is_other = any("precision" in choice.changes for choice in around)  # in which more may be possible
        possible = [each for each in self.choices.around if is_other or not self._is_refused(each)]
        starts = [self.outcomes.get(self._around_case(way.around)) for way in self.space.ways]
        known = of_optimizers(self.space.ways, starts, start)
        wanted = [frozenset({each}) for each in possible if self._goes_with(each, around) and matters(each, start)]
        changes = [each for each in wanted if each not in known]
        looked_at = [AS_IT_IS, *(frozenset({each}) for each in self.choices.of_blocks)] if among is None else among
        looked_at = [each for each in looked_at if all(self._goes_with(choice, around) for choice in each)]
        # blocks first: with them plans can be made, should the time end before the rest is known
        self.measured(dict(map(partial(self.action_case, around), looked_at)) | self._change_cases(around, changes))
        learned = self._changes(around, changes, exact) | known
        way = Effects(around, 1, exact, {each: learned[each] for each in wanted if each in learned})
        self._learn(way, looked_at)
        if self.space.blocks.paths and AS_IT_IS not in way.actions:
            return None  # time ended, or the copy cannot do what the model can: nothing is known of its blocks
        self.space.ways.append(way)
        return way

    def _change_cases(self, around: Around, changes: Sequence[Around]) -> dict[Case, Plan]:
        """Return the cases that tell what changes around the blocks do."""
        return self._around_cases(around | change for change in changes)

    def _changes(self, around: Around, changes: Sequence[Around], exact: Costs) -> dict[Around, Costs]:
        """Return what each change around the blocks does, from simulated cases."""
        learned = {}
        for change in changes:
            case = self._around_case(around | change)
            self._note(change, case)
            costs = Costs.of(self.outcomes.get(case))
            if costs is not None:
                learned[change] = costs - exact
        return learned

    def _learn(self, way: Effects, more: Iterable[Action]) -> None:
        """Simulate actions where that was not done, and note their effects."""
        told = {action: self.action_case(way.around, action) for action in more}
        found = self.measured(dict(told.values()))
        before = self.outcomes.get(self.action_case(way.around, AS_IT_IS)[0])
        if not isinstance(before, Measurement):
            return
        for action, (case, _) in told.items():
            self._note(action, case)
            effect = effect_of(before, found[case], self.space.blocks) if case in found else None
            if effect is not None and (not action or effect.is_felt):
                way.actions[action] = effect

    def _learn_rest(self, way: Effects) -> None:
        """Learn what single actions do outside of the blocks, and in which modules."""
        singles = [each for each in actions.best(way) if len(each) == 1 and not actions.recomputes(each)]
        told = {action: self.action_case(way.around, action, action) for action in singles}
        found = self.measured(dict(told.values()))
        blocks = tuple(f"{path}." for path in self.space.blocks.part.blocks)
        for action, (case, _) in told.items():
            costs = Costs.of(found.get(case))
            before = Costs.of(self.outcomes[self.action_case(way.around, action)[0]])
            if costs is not None and before is not None:
                paths = dict.fromkeys(site.path for site in found[case].sites if not site.path.startswith("("))
                (choice,) = action
                self.space.blocks.rest[choice] = tuple(path for path in paths if not f"{path}.".startswith(blocks))
                rest = (costs - before).of_rest().at(self.space.blocks.places)
                way.actions[action] = replace(way.actions[action], rest=rest)

    def _note(self, change: Around, case: Case) -> None:
        """Note the warnings of a single change, or why it was refused."""
        outcome = self.outcomes.get(case)
        if len(change) == 1 and outcome is not None:
            (choice,) = change
            if isinstance(outcome, Measurement):
                self.space.warnings.setdefault(choice, outcome.warnings)
            elif choice not in self.space.warnings:  # else it is possible, but not beside what it stood with here
                self.refused.setdefault(choice, outcome)

    def _is_refused(self, choice: Choice) -> bool:
        """Whether a choice alone has nothing to do in the model, or cannot be: then it is tried with no other."""
        return is_refusal(self.refused.get(choice))

    @staticmethod
    def _goes_with(choice: Choice, around: Around) -> bool:
        return all(choice.stands_with(other) for other in around)

    # -- other ways of computing ------------------------------------------------------------------------------------

    def _cut(self, way: Effects) -> None:
        """Learn of the same way of computing in micro-batches, down to those that hold next to nothing.

        Only the fewest are simulated: what belongs to samples shrinks with the micro-batch, and each one more takes the
        same time more.
        """
        held = way.exact.held.sum()
        wanted = {
            choice: parts
            for parts, choice in self.choices.in_parts[:_MOST_PARTS]
            if held >= LEAST_SHARE * parts * (way.exact.base + held) and self._goes_with(choice, way.around)
        }
        for fewest, count in wanted.items():
            case = self._around_case(way.around | {fewest})
            exact = Costs.of(self.measured({case: Plan(way.around | {fewest})}).get(case), count)
            self._note(frozenset({fewest}), case)
            if exact is None:
                continue
            self._cut_changes(way, fewest, count, exact)
            for choice, parts in wanted.items():
                if parts >= count:
                    told = (text.replace(fewest.name, choice.name, 1) for text in self.space.warnings.get(fewest, ()))
                    self.space.warnings.setdefault(choice, tuple(told))
                    self._add_parts(way, choice, parts, way.exact.in_more_parts(parts, count, exact))
            return

    def _cut_changes(self, way: Effects, fewest: Choice, parts: int, exact: Costs) -> None:
        """Learn what changes that matter between the passes do in the fewest micro-batches."""
        around = way.around | {fewest}
        changes = [
            change
            for change, costs in way.changes.items()
            if abs(costs.top) >= LEAST_SHARE * way.exact.peak and all(self._goes_with(each, around) for each in change)
        ]
        measured = self.measured(self._around_cases(around | change for change in changes))
        for change in changes:
            costs = Costs.of(measured.get(self._around_case(around | change)), parts)
            if costs is not None:
                self._in_parts[change] = parts, costs - exact

    def _spread(self, way: Effects, first: Effects) -> None:
        """Tell the same of another way of computing, from what micro-batches did in the first."""
        for cut in [each for each in self.space.ways if each.parts > 1 and len(each.around) == 1]:
            (choice,) = cut.around
            if self._goes_with(choice, way.around):
                slower = cut.exact.total_seconds / first.exact.total_seconds
                self._add_parts(way, choice, cut.parts, way.exact.cut(cut.parts, slower))

    def _add_parts(self, way: Effects, choice: Choice, parts: int, exact: Costs) -> None:
        around = way.around | {choice}
        changes = {
            each: change_in_parts(costs, parts, self._in_parts.get(each))
            for each, costs in way.changes.items()
            if all(self._goes_with(change, around) for change in each)
        }
        acting = {each: effect.in_parts(parts) for each, effect in way.actions.items()}
        self.space.ways.append(Effects(around, parts, exact, changes, acting))

    def _worth_a_look(self, first: Effects) -> list[Around]:
        """Return the other ways of computing that nothing beats that trains as near to the exact step."""
        others = actions.other_ways(self.choices.computing)
        alone = [around for around in others if len(around) == 1]
        self.measured(self._around_cases(alone))
        for around in alone:
            self._note(around, self._around_case(around))
        ways = [first.around, *(around for around in others if not any(map(self._is_refused, around)))]
        found = self.measured(self._around_cases(ways))
        needs = {
            around: (seconds, needed_bytes(measured))
            for around in ways
            if (measured := found.get(self._around_case(around))) is not None
            and (seconds := step_seconds_of(measured)) is not None
        }
        return [each for each in needs if each != first.around and not actions.is_beaten(each, needs)][:_MOST_WAYS]
