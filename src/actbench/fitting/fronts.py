"""The stacks of one group of choices that are worth combining with other groups: few others beat them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from actbench.fitting.choices import Choice, Choices, Stack
from actbench.fitting.needs import Needs
from actbench.fitting.prediction import Predictions
from actbench.results.fits import GRADIENTS, Training

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
        beaten = _beaten(np.array([_costs(stack, predictions, exact) for stack in group]))
        kept += [stack for stack, by in zip(group, beaten, strict=True) if by < _BEATEN_BY]
    return kept


def _costs(stack: Stack, predictions: Predictions, exact: Needs) -> tuple[float, ...]:
    needs = exact
    for choice in stack:
        needs = predictions.effect(choice).on(needs)
    # All else is equal in these stacks, so these numbers decide every peak, whatever the other groups do.
    forward, backward, update = needs.phases
    return needs.seconds, forward, backward, update, needs.gradients, needs.activations


def _beaten(rows: np.ndarray) -> list[int]:
    """Return how many others beat each row: they are no larger in anything and smaller in something."""
    counts = []
    for row in rows:
        no_worse = (rows <= row).all(axis=1)
        counts.append(int((no_worse & (rows < row).any(axis=1)).sum()))
    return counts
