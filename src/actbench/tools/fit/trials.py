"""The stacks that a search has simulated, on the model itself or on shorter copies, and what was learned of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure, FailureReason
from actbench.tools.fit.choices import Choices, Stack, case_of, group_of, training_of
from actbench.tools.fit.leftout import Refusals
from actbench.tools.fit.needs import Copies, Needs, agree
from actbench.tools.fit.prediction import Predictions
from actbench.tools.fit.records import Training

Simulate = Callable[[Mapping[Case, Stack]], Iterable[tuple[Case, Outcome]]]
"""Simulates the cases of stacks and yields each with its outcome; leaves out those for which there is no time."""

_BLOCKS_OF_COPIES = 8  # exploring a stack takes about as long as simulating so many blocks of a whole model
_REFUSALS: frozenset[FailureReason] = frozenset(("nothing-converted", "unsupported", "unavailable"))


@dataclass
class Trials:
    """Stacks, simulated a few at a time.

    Attributes:
        exact: The case of the exact step.
        limit: Bytes that a step may use.
        jobs: How many cases are simulated at a time.
        copies: Tell what a stack needs without the whole model; None if its blocks are few, or differ.
        outcomes: Of the stacks that were simulated on the model itself, in order.
        explored: Of those that were simulated on its copies, the longer copy's outcome, or a copy's failure.
        untried: Stacks for which there was no time.
    """

    exact: Case
    limit: int
    choices: Choices
    jobs: int = 1
    copies: Copies | None = None
    simulate: Simulate = field(default=lambda stacks: (), repr=False)
    outcomes: dict[Stack, Outcome] = field(default_factory=dict)
    explored: dict[Stack, Outcome] = field(default_factory=dict)
    untried: list[Stack] = field(default_factory=list)
    predictions: Predictions = field(default_factory=Predictions)
    refusals: Refusals = field(init=False, repr=False)
    _trainings: dict[Stack, Training] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.refusals = Refusals(self.choices.from_on)

    @property
    def base(self) -> Needs:
        """Needs of the exact step."""
        return self.predictions.known[frozenset()]

    @property
    def seen(self) -> Mapping[Stack, Outcome]:
        """The outcomes of all stacks, of the model itself where there is one."""
        return {**self.explored, **self.outcomes}

    def was_seen(self, stack: Stack) -> bool:
        """Whether a stack was simulated, on the model itself or on its copies."""
        return stack in self.outcomes or stack in self.explored

    def begin(self) -> bool:
        """Simulate the exact step, and see whether copies of the model tell the same; whether a search can go on."""
        exact: Stack = frozenset()
        self.try_out([exact])
        found, outcome = self.predictions.known.get(exact), self.outcomes.get(exact)
        if isinstance(outcome, Measurement):
            self.choices = self.choices.suited(self.exact, outcome)
        if found is not None and self.copies is not None:
            self._simulate({exact: self._cases(exact)})
            told = self.predictions.known[exact]
            if not isinstance(self.explored.get(exact), Measurement) or not agree(told, found):
                self.copies = None
            self.predictions.learn(exact, replace(found, lost=told.lost))
        return found is not None

    def fits(self, stack: Stack) -> bool:
        """Whether a stack was simulated on the model itself and fits."""
        outcome = self.outcomes.get(stack)
        return isinstance(outcome, Measurement) and outcome.fits

    def seems_to_fit(self, stack: Stack) -> bool:
        """Whether a stack was simulated and fits, as far as copies tell if it was only simulated on them."""
        if stack in self.outcomes:
            return self.fits(stack)
        return stack in self.predictions.known and self.predictions.known[stack].bytes <= self.limit

    def seconds(self, stack: Stack) -> float:
        """Return the estimated seconds of a simulated stack."""
        return self.predictions.known[stack].seconds

    def training(self, stack: Stack) -> Training:
        """Return how training with a stack differs, by the simulations of its choices."""
        if stack not in self._trainings:
            alone = [frozenset({choice}) for choice in stack]
            outcomes = [self.outcomes.get(each, self.explored.get(each)) for each in alone]
            warnings = [text for outcome in outcomes for text in getattr(outcome, "warnings", ())]
            self._trainings[stack] = training_of(stack, warnings)
        return self._trainings[stack]

    def fastest(self, training: Training) -> Stack | None:
        """Return the fastest stack that fits and whose training is as near to the exact step's as ``training``."""
        near = (stack for stack in self.outcomes if self.fits(stack) and self.training(stack).is_as_near(training))
        return min(near, key=self.seconds, default=None)

    def explore(self, stacks: Sequence[Stack]) -> bool:
        """Simulate the stacks that were not: on copies of the model, or else on itself; whether anything is new.

        A stack whose copies tell nothing, as they took too long, say, is simulated on the model itself.
        """
        found = self._simulate({stack: self._cases(stack) for stack in stacks if not self.was_seen(stack)})
        told_nothing = [stack for stack in self.explored if stack not in self.predictions.known]
        return self.try_out([stack for stack in told_nothing if not self.refusals.exclude(stack)]) or found

    def try_out(self, stacks: Sequence[Stack]) -> bool:
        """Simulate stacks on the model itself, those that were not; whether anything is new."""
        return self._simulate({stack: (case_of(stack, self.exact),) for stack in stacks if stack not in self.outcomes})

    def ahead(self) -> Iterator[Stack]:
        """Yield stacks that will be explored later, to be explored at once if jobs are free."""
        return iter(())

    def _cases(self, stack: Stack) -> tuple[Case, ...]:
        return (self.copies.cases(stack) if self.copies else ()) or (case_of(stack, self.exact),)

    def _simulate(self, new: dict[Stack, tuple[Case, ...]]) -> bool:
        """Simulate the cases of stacks; return whether anything new is known.

        They are learned of in their order, however they end: where they run decides nothing.
        """
        spare = self.jobs - sum(map(len, new.values()))
        ahead = self._fill(spare, new) if new and spare > 0 else {}
        both = new | ahead
        ended = dict(self.simulate({case: stack for stack, cases in both.items() for case in cases}))
        for stack, cases in both.items():
            if all(case in ended for case in cases):
                self._learn_of(stack, [ended[case] for case in cases])
            elif stack in new and stack not in self.untried and stack not in self.outcomes:
                self.untried.append(stack)
        return bool(ended)

    def _fill(self, spare: int, new: Mapping[Stack, tuple[Case, ...]]) -> dict[Stack, tuple[Case, ...]]:
        """Return stacks that will be explored later, with their cases, as many as keep free jobs busy meanwhile."""
        later = ((stack, self._cases(stack)) for stack in self.ahead() if stack not in new)
        if self.copies is None or all(len(cases) > 1 for cases in new.values()):
            return dict(itertools.islice(later, spare))
        short = ((stack, cases) for stack, cases in later if len(cases) > 1)
        return dict(itertools.islice(short, spare * (self.copies.blocks // _BLOCKS_OF_COPIES)))

    def _learn_of(self, stack: Stack, outcomes: Sequence[Outcome]) -> None:
        outcome = next((each for each in outcomes if not isinstance(each, Measurement)), outcomes[-1])
        if len(outcomes) == 1:
            self.outcomes[stack] = outcome
            needs = Needs.of(outcome) if isinstance(outcome, Measurement) else None
        else:
            self.explored[stack] = outcome
            needs = self.copies.needs(stack, outcomes) if self.copies else None
        if len(stack) == 1:
            self._trainings.clear()
        if needs is not None:
            self.predictions.learn(stack, needs)
            self.refusals.simulated(stack)
        elif stack and isinstance(outcome, Failure) and outcome.reason in _REFUSALS:
            self.refusals.refused(_refused_part(stack, outcome))


def _refused_part(stack: Stack, failure: Failure) -> Stack:
    """Return the choices of a refused stack that may be why: not the optimizer, if a scheme of samples says so."""
    blamed = [each for each in stack if failure.message.startswith((f"{each.name} ", f"{each.name}:", f"{each.kind}:"))]
    if any(group_of(choice) == "samples" for choice in blamed):
        return frozenset(choice for choice in stack if group_of(choice) != "model")
    return stack
