"""Predicts what a stack needs from what its choices did in simulated stacks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from operator import itemgetter
from typing import NamedTuple

from actbench.tools.fit.choice import Choice
from actbench.tools.fit.choices import Stack, group_of
from actbench.tools.fit.needs import Needs

_MOST_OF_MODEL, _MOST_OF_SAMPLES = 4.0, 1.1
"""What a choice changes by a larger factor says little of what is there without it, as when it is offloaded.

Choices that work on samples do very different things beside each other: offloading costs nothing beside recomputation.
"""

_BYTES, _PASSES, _UPDATE = slice(0, 4), slice(4, 5), slice(5, 6)
"""The kinds of factors of an effect."""


class Effect(NamedTuple):
    """What a choice does: factors for weights, gradients, state, activations and seconds; differences for the rest."""

    factors: tuple[float, float, float, float, float, float]
    differences: tuple[float, float, float, float]

    @classmethod
    def between(cls, before: Needs, after: Needs) -> Effect:
        """Return the effect that turns the needs without a choice into those with it."""
        (*held, forward, backward, update, lost, passes, step) = zip(astuple(before), astuple(after), strict=True)
        return cls(
            tuple(with_it / without if without else 1.0 for without, with_it in (*held, passes, step)),  # type: ignore[arg-type]
            tuple(with_it - without for without, with_it in (forward, backward, update, lost)),
        )

    @property
    def inverse(self) -> Effect:
        """The effect of leaving the choice out."""
        return Effect(
            tuple(1 / factor if factor else math.inf for factor in self.factors),  # type: ignore[arg-type]
            tuple(-difference for difference in self.differences),  # type: ignore[arg-type]
        )

    def on(self, needs: Needs) -> Needs:
        """Return the needs with the choice, from those without."""
        weights, gradients, state, activations, passes, update_seconds = self.factors
        forward, backward, update, lost = self.differences
        return Needs(
            weights=needs.weights * weights,
            gradients=needs.gradients * gradients,
            state=needs.state * state,
            activations=needs.activations * activations,
            forward=max(0.0, needs.forward + forward),
            backward=max(0.0, needs.backward + backward),
            update=max(0.0, needs.update + update),
            lost=max(0.0, needs.lost + lost),
            passes_seconds=needs.passes_seconds * passes,
            update_seconds=needs.update_seconds * update_seconds,
        )


class Predictions:
    """Learns from each simulated stack, and predicts the others."""

    def __init__(self) -> None:
        self.known: dict[Stack, Needs] = {}
        self._simulated: dict[Stack, Needs] = {}
        self._effects: dict[Choice, dict[Stack, Effect]] = {}
        self._memo: dict[Stack, Needs | None] = {}
        self._places: dict[Choice, int] = {}
        self._masks: dict[Stack, int] = {}

    def learn(self, stack: Stack, needs: Needs) -> None:
        """Note what a simulated stack needs."""
        self._simulated[stack] = needs
        self._know(stack)
        for other in [each for each in self._simulated if each - _stepping(each) == stack and each != stack]:
            self._know(other)

    def _know(self, stack: Stack) -> None:
        self._bits(stack)
        self.known[stack] = self._parted(stack, self._simulated[stack])
        pairs = [(stack - {choice}, stack) for choice in stack if stack - {choice} in self.known]
        pairs += [(stack, larger) for larger in self.known if len(larger) == len(stack) + 1 and stack < larger]
        for smaller, larger in pairs:
            (choice,) = larger - smaller
            self._effects.setdefault(choice, {})[smaller] = Effect.between(self.known[smaller], self.known[larger])
        self._forget(stack, frozenset().union(*(larger - smaller for smaller, larger in pairs)))

    def _forget(self, stack: Stack, changed: Stack) -> None:
        """Forget the predictions that a stack now makes better: those it is near to, and those by changed effects."""
        new, better = self._bits(stack), self._bits(changed)
        for other in list(self._memo):
            bits = self._bits(other)
            more = new & ~bits
            if bits & better or more & (more - 1) == 0:  # at most one choice that the other lacks
                del self._memo[other]

    def _parted(self, stack: Stack, needs: Needs) -> Needs:
        """Return needs with the time of the update apart, if the stack steps within the backward pass.

        It takes as long as without that; else a slower update would not be seen to make such a stack slower.
        """
        within = _stepping(stack)
        apart = (self.of(stack - within) or self.known.get(frozenset())) if within else None
        if apart is None:
            return needs
        update_seconds = min(apart.update_seconds, needs.seconds)
        return replace(needs, passes_seconds=needs.seconds - update_seconds, update_seconds=update_seconds)

    def knows(self, choice: Choice) -> bool:
        """Whether some simulation showed the effect of a choice."""
        return choice in self._effects

    def effect(self, choice: Choice, within: Stack = frozenset()) -> Effect:
        """Return the effect of a choice in the simulated stack most like ``within``; of equal ones, in the largest."""
        bits, seen = self._bits(within), self._effects[choice]

        def likeness(other: Stack) -> tuple[int, int]:
            theirs = self._masks[other]
            shared = (theirs & bits).bit_count()
            return 2 * shared - theirs.bit_count(), shared

        return seen[max(seen, key=likeness)]

    def of(self, stack: Stack) -> Needs | None:
        """Return the needs of a stack, simulated or predicted; None if a choice of it was never simulated."""
        if stack in self.known:
            return self.known[stack]
        if stack not in self._memo:
            self._memo[stack] = self._predicted(stack) if all(map(self.knows, stack)) else None
        return self._memo[stack]

    def _predicted(self, stack: Stack) -> Needs:
        near = self._near(stack)
        starts = [self._first(near, stack, kind) for kind in (_BYTES, _PASSES, _UPDATE)]
        found = {start: self._from(start, stack) for start in dict.fromkeys(starts)}
        held, passes, update = (found[start] for start in starts)
        return replace(held, passes_seconds=passes.passes_seconds, update_seconds=update.update_seconds)

    def _near(self, stack: Stack) -> list[Stack]:
        """Return the simulated stacks that have at most one choice that another lacks, the most like it first."""
        bits = self._bits(stack)
        found = []
        for other in self.known:
            theirs = self._masks[other]
            shared = theirs & bits
            more = theirs ^ shared
            if more & (more - 1) == 0:
                count = shared.bit_count()
                found.append((count - (more > 0), count, other))
        found.sort(key=itemgetter(0, 1), reverse=True)
        return [other for *_, other in found]

    def _first(self, near: Sequence[Stack], stack: Stack, kind: slice) -> Stack:
        """Return the first near stack that tells this kind of another."""
        return next(other for other in near if all(self._tells(choice, stack, kind) for choice in other - stack))

    def _from(self, start: Stack, stack: Stack) -> Needs:
        """Return the needs of a stack from those of a simulated one, with the choices exchanged that differ."""
        less = [self.effect(choice, stack).inverse for choice in start - stack]
        more = [self.effect(choice, stack) for choice in sorted(stack - start, key=lambda choice: choice.name)]
        return functools.reduce(lambda needs, effect: effect.on(needs), (*less, *more), self.known[start])

    def _tells(self, choice: Choice, stack: Stack, kind: slice) -> bool:
        """Whether stacks with a choice tell what it is like without: it changes little of this kind."""
        most = _MOST_OF_MODEL if group_of(choice) == "model" else _MOST_OF_SAMPLES
        if not self.knows(choice):
            return False
        factors: tuple[float, ...] = self.effect(choice, stack).factors
        return all(1 / most <= factor <= most for factor in factors[kind])

    def _bits(self, stack: Stack) -> int:
        """Return a stack as a set of bits: thousands are compared with all simulated ones after each simulation."""
        if stack not in self._masks:
            for choice in stack - self._places.keys():
                self._places[choice] = 1 << len(self._places)
            self._masks[stack] = sum(self._places[choice] for choice in stack)
        return self._masks[stack]


def _stepping(stack: Stack) -> Stack:
    """Return the choices of a stack that step within the backward pass."""
    return frozenset(choice for choice in stack if choice.steps_within_backward)
