"""Which stacks a search leaves out: too far from exact training, beaten by others, or refused by the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from actbench.model.gradient import GRADIENTS, Gradient
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.choices import Choices, Stack
from actbench.tools.fit.needs import Needs
from actbench.tools.fit.prediction import Predictions
from actbench.tools.fit.records import Trained, Training


@dataclass(frozen=True)
class Level:
    """How far training may differ from the exact step's."""

    trained: Trained
    gradient: Gradient
    others: bool

    @property
    def training(self) -> Training:
        """The training that differs most and is still allowed."""
        other = "other" if self.others else "same"
        return Training(trained=self.trained, gradient=self.gradient, updates=other, precision=other)

    def allows(self, training: Training) -> bool:
        """Whether training is as near to the exact step's as this level, apart from what is trained."""
        return training.model_copy(update={"trained": self.trained}).is_as_near(self.training)


EXACT = Level("all", "exact", others=False)
LEVELS = (
    EXACT,
    Level("adapters", "exact", others=False),  # what most people do where a large model does not fit
    *(Level(trained, gradient, True) for gradient in GRADIENTS for trained in get_args(Trained)),
)


TrainingOf = Callable[[Stack], Training]
MOST_PARTS = 4
"""Most choices of one group in a stack."""

_BEATEN_BY = 3
"""Leave out a stack if so many others beat it in everything; one is too few, as predictions are not exact."""


def front(
    group: Sequence[Choice], choices: Choices, predictions: Predictions, exact: Needs, training: TrainingOf
) -> list[Stack]:
    """Return the stacks of a group's choices that few others beat, with the empty stack.

    Only these stacks grow further, since a choice is predicted to do the same in every stack.
    """
    places = {choice: place for place, choice in enumerate(group)}
    kept = grown = [frozenset[Choice]()]
    for _ in range(MOST_PARTS):
        larger = [
            stack | {choice}
            for stack in grown
            for choice in group[1 + max((places[each] for each in stack), default=-1) :]
            if choices.together(stack, choice)
        ]
        kept = _unbeaten([*kept, *larger], predictions, exact, training)
        grown = [stack for stack in kept if stack in set(larger)]
    return kept


def _unbeaten(stacks: Sequence[Stack], predictions: Predictions, exact: Needs, training: TrainingOf) -> list[Stack]:
    def distance(stack: Stack) -> tuple[str, int, str, str]:
        found = training(stack)
        return found.trained, GRADIENTS.index(found.gradient), found.updates, found.precision

    kept: list[Stack] = []
    for _, alike in itertools.groupby(sorted(stacks, key=distance), key=distance):
        group = list(alike)
        rows = np.array([_costs(stack, predictions, exact) for stack in group])
        # how many others are no larger in anything and smaller in something
        beaten = [int(((rows <= row).all(axis=1) & (rows < row).any(axis=1)).sum()) for row in rows]
        kept += [stack for stack, by in zip(group, beaten, strict=True) if by < _BEATEN_BY]
    return kept


def _costs(stack: Stack, predictions: Predictions, exact: Needs) -> tuple[float, ...]:
    needs = exact
    for choice in stack:
        needs = predictions.effect(choice).on(needs)
    # All else is equal in these stacks, so these numbers decide every peak, whatever the other groups do.
    forward, backward, update = needs.phases
    return needs.seconds, forward, backward, update, needs.gradients, needs.activations


class Refusals:
    """Stacks that were refused, such as those in which one scheme leaves nothing to convert for another.

    Choices of one stack that was simulated stand together. If of all pairs of a refused stack only one was never
    simulated together, that pair is refused in every stack. What is refused is refused with values of its schemes that
    save more, too.

    Args:
        from_on: From a choice to the values of its scheme that save as much or more, itself among them.
    """

    def __init__(self, from_on: Callable[[Choice], Iterable[Choice]] = lambda choice: (choice,)) -> None:
        self._from_on = from_on
        self._refused: list[Stack] = []
        self._stand: set[Stack] = set()
        self._excluded: list[Stack] = []

    def simulated(self, stack: Stack) -> None:
        """Note that a stack was simulated."""
        self._stand.update(map(frozenset, itertools.combinations(stack, 2)))
        self._find()

    def refused(self, stack: Stack) -> None:
        """Note that a stack was refused."""
        self._refused.append(stack)
        self._find()

    def exclude(self, stack: Stack) -> bool:
        """Return whether a stack would be refused, as it has all choices of one that was, or a pair that is."""
        return any(part <= stack for part in self._excluded)

    def _find(self) -> None:
        found = [*self._refused, *(pair for refused in self._refused for pair in self._culprit(refused))]
        self._excluded = [frozenset(each) for stack in found for each in itertools.product(*map(self._from_on, stack))]

    def _culprit(self, refused: Stack) -> list[Stack]:
        suspects = set(map(frozenset, itertools.combinations(refused, 2))) - self._stand
        return list(suspects) if len(suspects) == 1 else []
