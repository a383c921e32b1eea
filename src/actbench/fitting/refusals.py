"""What a search learns from stacks that a model refuses: which of their choices do not stand together on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product

from actbench.fitting.choices import Choice, Stack


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
        self._stand.update(map(frozenset, combinations(stack, 2)))
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
        self._excluded = [frozenset(each) for stack in found for each in product(*map(self._from_on, stack))]

    def _culprit(self, refused: Stack) -> list[Stack]:
        suspects = [pair for pair in map(frozenset, combinations(refused, 2)) if pair not in self._stand]
        return suspects if len(suspects) == 1 else []
