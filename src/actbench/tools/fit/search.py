"""Chooses the stacks to simulate: the parts of the peak decide what is tried, predictions decide the order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from actbench.model.measured import Measurement
from actbench.scheme.base import Change
from actbench.tools.fit.choice import ADAPTS, Choice
from actbench.tools.fit.choices import OF_MODEL, OF_SAMPLES, Rung, Stack, group_of, rung_of
from actbench.tools.fit.leftout import LEVELS, Level, front
from actbench.tools.fit.needs import Needs
from actbench.tools.fit.records import Trained, Training
from actbench.tools.fit.trials import Simulate, Trials

_SPEEDS: frozenset[Change] = frozenset(("precision", "optimizer"))
"""Changes that may make a step faster than the exact step."""

_MARGIN = 0.03  # share of the limit: a stack predicted to need this much more is still tried
_NEIGHBOURS_MARGIN = 0.15  # the same for a stack that differs in one choice from the fastest
_NEIGHBOURS_SLACK = 0.04  # share of the fastest stack's time: a neighbour may be predicted to be this much slower
_GAIN = 0.002  # share of a step's time; a smaller gain is not worth a try
_FITTING_RUNGS = 2  # when so many values of one scheme fit alone, those that save more are not tried
_LOWER = 0.03  # share of a peak; a stack that takes longer and needs so much less is worth showing
_LOWER_SHOWN, _LEAST_SHOWN = 6, 3
_LEAST_WORK = 0.05  # share of a step's time; what works on operators that take less is not tried to be faster
_PATIENCE = 10  # a level ends after so many stacks in a row that were not as fast or small as predicted
_DESCENTS = 4  # how many stacks are tried although none is predicted to fit, those of the least predicted need


@dataclass
class Search(Trials):
    """One search; after :meth:`run`, ``outcomes`` has what was tried, in order.

    Attributes:
        max_slowdown: Most that a stack may take, in multiples of the exact step's time.
    """

    max_slowdown: float = 2.0
    _later: Sequence[Level] = field(default=(), repr=False)

    def run(self, simulate: Simulate, levels: Sequence[Level] = LEVELS) -> None:
        """Simulate the exact step, then stacks that may be better, from the nearest training to the furthest."""
        self.simulate = simulate
        if not self.begin():
            return
        self._probe(levels)
        for place, level in enumerate(levels):
            self._later = levels[place + 1 :]
            self._learn(level)
            self._improve(level)
        for level in levels:
            # something fits: what may make a step faster is simulated alone, though memory suffices
            if self.fastest(level.training) is not None:
                found = (choice for choice in self._new(level) if choice.quickens and self._works(choice))
                self.explore([frozenset({choice}) for choice in found])
            self._complete(level)
        for trained in dict.fromkeys(level.trained for level in levels):
            self._settle(trained)

    def _probe(self, levels: Sequence[Level]) -> None:
        """If the exact step does not fit, simulate the stacks that most likely do, before time may end.

        Where copies of the model tell that some fit, the fastest of them with and without adapters are simulated whole.
        """
        exact = frozenset[Choice]()
        if self.seems_to_fit(exact):
            return
        strong = self.choices.strongest(self.predictions.known[exact].to_lower(self.limit))
        training = {stack: self.training(stack) for stack in strong}
        allowed = [
            stack
            for stack, what in training.items()
            if any(level.trained == what.trained and level.allows(what) for level in levels)
        ]
        self.explore(allowed)
        fitting = [stack for stack in allowed if self.seems_to_fit(stack) and self._is_fast(stack)]
        fastest = {training[stack].trained: stack for stack in sorted(fitting, key=self.seconds, reverse=True)}
        self.try_out(list(fastest.values()))

    def _is_fast(self, stack: Stack) -> bool:
        return self.seconds(stack) <= self.max_slowdown * self.base.seconds

    def _learn(self, level: Level) -> None:
        """Simulate alone each choice that is new at a level and may matter there."""
        if level.trained == "adapters":
            self.explore([frozenset({choice}) for choice in self._new(level) if ADAPTS in choice.changes])
        rungs = self._rungs(level)
        while rungs := {kind: ladder for kind, ladder in rungs.items() if ladder and not self._suffices(kind)}:
            self.explore([frozenset({ladder.pop(0)}) for ladder in rungs.values()])

    def _new(self, level: Level) -> list[Choice]:
        """Return the choices that a level allows and that were not simulated alone."""
        untried = (choice for choice in self.choices.all if not self.was_seen(frozenset({choice})))
        return [choice for choice in untried if level.allows(choice.training)]

    def _rungs(self, level: Level) -> dict[Rung, list[Choice]]:
        """Return the choices that are new at a level and may matter there, adapters left out."""
        matters = self._what_matters(level)
        rungs: dict[Rung, list[Choice]] = {}
        for choice in self._new(level):
            if matters.issuperset(choice.changes):
                rungs.setdefault(rung_of(choice), []).append(choice)
        return rungs

    def ahead(self) -> Iterator[Stack]:
        """Yield, of each scheme that later levels try alone, the first value that was not tried."""
        seen: set[Rung] = set()
        for level in self._later:
            for kind, ladder in self._rungs(level).items():
                if kind not in seen and not self._suffices(kind):
                    seen.add(kind)
                    yield frozenset({ladder[0]})

    def _suffices(self, kind: Rung) -> bool:
        """Whether the model refuses a scheme, or values of it fit alone: those that save more take longer."""
        alone = list(filter(self.was_seen, (frozenset({choice}) for choice in self.choices.rungs[kind])))
        return any(map(self.refusals.exclude, alone)) or sum(map(self.seems_to_fit, alone)) >= _FITTING_RUNGS

    def _what_matters(self, level: Level) -> set[Change]:
        """Return the changes that a stack needs to fit, or to be faster than the fastest stack that fits."""
        start = self._start(level)
        if start is None or self.seems_to_fit(start):
            return set(_SPEEDS)
        base, fastest = self.predictions.known[start], self.fastest(level.training)
        changed = {change for choice in fastest or () for change in choice.changes}
        groups = [group for group in (OF_SAMPLES, OF_MODEL) if group & changed]
        if not groups and (fastest is None or self.seconds(fastest) > base.seconds):
            groups = [base.to_lower(self.limit)]
        return set(_SPEEDS).union(*groups)

    def _start(self, level: Level) -> Stack | None:
        """Return the stack that a level begins with: empty, or the fastest adapters alone, or None without adapters."""
        if level.trained == "all":
            return frozenset()
        alone = (stack for stack in self.predictions.known if len(stack) == 1)
        near = (stack for stack in alone if self.training(stack).trained == "adapters")
        return min(filter(lambda stack: level.allows(self.training(stack)), near), key=self.seconds, default=None)

    def _improve(self, level: Level) -> None:
        """Simulate stacks that are predicted to fit and to be faster, until none is left or many in a row were not."""
        stacks = self._candidates(level)
        descents = failed = 0
        while failed < _PATIENCE:
            best = self._promising(stacks, _MARGIN)
            descends = not best and self.fastest(level.training) is None and descents < _DESCENTS
            if descends:
                best = self._promising(stacks, 0, math.inf) or self._least(stacks)
                best = sorted(best, key=lambda stack: stack not in self.explored)[:1]
            best = self._varied(best)
            new = sum(not self.was_seen(stack) for stack in best)
            descents += new if descends else 0
            if not best or not self._advance(best):
                self.untried += [stack for stack in best if stack not in {*self.untried, *self.outcomes}]
                return
            failed = 0 if any(map(self._pays, best)) else failed + new

    def _pays(self, stack: Stack) -> bool:
        """Whether a stack that was simulated is the fastest of its training, or may be, as far as copies tell."""
        if stack in self.outcomes:
            return self.fastest(self.training(stack)) == stack
        needs = self.predictions.known.get(stack)
        if needs is None or not self._may_fit(stack, needs, 0):
            return False
        return needs.seconds < self._bound(self.training(stack))

    def _varied(self, best: Sequence[Stack]) -> list[Stack]:
        """Return the first of the best stacks, one for each job, that do different things to samples.

        Of two that differ in the optimizer alone, the simulation of one tells enough to predict the other.
        """
        first: dict[Stack, Stack] = {}
        for stack in best:
            first.setdefault(frozenset(choice for choice in stack if group_of(choice) == "samples"), stack)
        return list(first.values())[: self.jobs]

    def _advance(self, best: Sequence[Stack]) -> bool:
        """Take the best stacks one step further: try those that are explored, or else explore them.

        Return whether anything new is known.
        """
        explored = [stack for stack in best if stack in self.explored]
        return self.try_out(explored) if best[0] in explored else self.explore(best)

    def _candidates(self, level: Level) -> list[Stack]:
        """Return the stacks of a level that are worth predicting."""
        groups: dict[str, list[Choice]] = {"samples": [], "model": [], "precision": [], "parameters": []}
        for choice in self._allowed(level):
            groups[group_of(choice)].append(choice)
        if level.trained == "all":
            groups["parameters"] = []
        fronts = [front(group, self.choices, self.predictions, self.base, self.training) for group in groups.values()]
        if level.trained == "adapters":
            fronts[-1] = [stack for stack in fronts[-1] if stack]
        stacks = (frozenset[Choice]().union(*parts) for parts in itertools.product(*fronts))
        return [stack for stack in stacks if self.choices.stands(stack)]

    def _allowed(self, level: Level) -> list[Choice]:
        """Return the choices of a level that were simulated."""
        known = filter(self.predictions.knows, self.choices.all)
        return [choice for choice in known if level.allows(self.training(frozenset({choice})))]

    def _promising(
        self, stacks: Iterable[Stack], margin: float, bound: float | None = None, slack: float = 0.0
    ) -> list[Stack]:
        """Return stacks predicted to fit, and to be faster than any that fits with training as near; fastest first."""
        bounds: dict[Training, float] = {}
        found: list[tuple[float, str, Stack]] = []
        for stack in stacks:
            if not self._is_new(stack):
                continue
            needs = self.predictions.of(stack)
            if needs is None or not self._may_fit(stack, needs, margin):
                continue
            training = self.training(stack)
            if training not in bounds:
                bounds[training] = self._bound(training) if bound is None else bound
            forgiven = 0.0 if stack in self.explored else slack  # copies tell times as they are
            if needs.seconds < (1 + forgiven) * bounds[training]:
                found.append((needs.seconds, "+".join(sorted(choice.name for choice in stack)), stack))
        return [stack for _, _, stack in sorted(found, key=lambda each: each[:2])]

    def _may_fit(self, stack: Stack, needs: Needs, margin: float) -> bool:
        """Whether a stack may fit; copies of the model tell its peak, but not the bytes lost between blocks."""
        if stack in self.explored:
            return needs.peak <= (1 + _MARGIN) * self.limit
        return needs.bytes <= (1 + margin) * self.limit

    def _is_new(self, stack: Stack) -> bool:
        return stack not in self.outcomes and stack not in self.untried and not self.refusals.exclude(stack)

    def _bound(self, training: Training) -> float:
        fastest = self.fastest(training)
        allowed = self.max_slowdown * self.base.seconds
        return allowed if fastest is None else min(allowed, (1 - _GAIN) * self.seconds(fastest))

    def _least(self, stacks: Iterable[Stack]) -> list[Stack]:
        """Return the untried stack with the least predicted need, if it needs less than every simulated one."""
        predicted = [
            (needs.bytes, needs.seconds, index, stack)
            for index, stack in enumerate(stacks)
            if self._is_new(stack) and (needs := self.predictions.of(stack))
        ]
        least = min(predicted, default=None)
        known = min((needs.bytes for needs in self.predictions.known.values()), default=math.inf)
        return [least[-1]] if least is not None and least[0] < known else []

    def _works(self, choice: Choice) -> bool:
        """Whether the operators that a choice works on, if it names them, take enough of the exact step's time."""
        exact = self.outcomes[frozenset()]
        operators = () if choice.scheme is None else choice.scheme.card.of_operators
        if not (operators and isinstance(exact, Measurement) and exact.estimated):
            return True
        seconds = sum(each.seconds for each in exact.estimated.by_operator if each.name in operators)
        return seconds > _LEAST_WORK * exact.estimated.step_seconds

    def _complete(self, level: Level) -> None:
        """Try the neighbours of a level's fastest stack, which differ in one choice: removed, replaced or added."""
        while True:
            fastest = self.fastest(level.training)
            if fastest is None:
                return
            near = list(self._neighbours(fastest, level))
            best = self._promising(near, _NEIGHBOURS_MARGIN, slack=_NEIGHBOURS_SLACK)
            if not best or not self._advance(self._varied(best)):
                return

    def _neighbours(self, stack: Stack, level: Level) -> Iterator[Stack]:
        allowed = self._allowed(level)
        update = self.predictions.known[stack].update_seconds
        if update < _GAIN * self.seconds(stack) and not any(choice.steps_within_backward for choice in stack):
            allowed = [choice for choice in allowed if "optimizer" not in choice.changes]  # no update is faster by more
        for choice in stack:
            yield stack - {choice}
            for other in allowed:
                if group_of(other) == group_of(choice) and self.choices.together(stack - {choice}, other):
                    yield (stack - {choice}) | {other}
        for other in allowed:
            if group_of(other) != "parameters" and self.choices.together(stack, other):
                yield stack | {other}

    def _settle(self, trained: Trained) -> None:
        """Try stacks that were only explored: those that take longer and need less, or, if nothing fits, need least."""
        alike = [stack for stack in self.predictions.known if self.training(stack).trained == trained]
        needs = {stack: self.predictions.known[stack] for stack in alike}
        if not any(self.fits(stack) for stack in alike):
            least = sorted(alike, key=lambda stack: needs[stack].peak)
            self.try_out(least[:_LEAST_SHOWN])
            return
        found: list[Stack] = []
        for stack in sorted((each for each in alike if self.seems_to_fit(each)), key=self.seconds):
            if not found or needs[stack].peak < (1 - _LOWER) * needs[found[-1]].peak:
                found.append(stack)
        self.try_out(list(filter(self._is_fast, found))[:_LOWER_SHOWN])
