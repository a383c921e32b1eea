"""Predicts what a stack needs from what its choices did in simulated stacks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from actbench.fitting.choices import OF_MODEL, OF_SAMPLES, Choice, Stack
from actbench.results.fits import step_seconds_of
from actbench.results.measured import Measurement
from actbench.schemes.base import Change

_LEAST_SHARE = 0.03  # share of a peak; a smaller part is not worth lowering
_LEAST_FACTOR = 0.25
"""What a choice leaves less of, such as what offloading cannot move, says little of what is there without it."""


@dataclass(frozen=True)
class Needs:
    """What a step needs: bytes and seconds.

    Attributes:
        forward: Peak of the forward pass beyond weights, optimizer state and activations; may be below 0, as the next.
        backward: Peak of the backward pass beyond weights, state and the larger of activations and gradients.
        update: Peak of the optimizer's step beyond weights, gradients and state.
        lost: Bytes that the allocator loses between blocks.
        passes_seconds: Time of the forward and backward pass.
        update_seconds: Time of the optimizer's step.
    """

    weights: float
    gradients: float
    state: float
    activations: float
    forward: float
    backward: float
    update: float
    lost: float
    passes_seconds: float
    update_seconds: float

    @classmethod
    def of(cls, measured: Measurement) -> Needs | None:
        """Return the needs of a simulated step; None if it has no estimated time."""
        peaks, time, seconds = measured.phase_peaks, measured.estimated, step_seconds_of(measured)
        if peaks is None or time is None or seconds is None:
            return None
        weights, activations = measured.weights_bytes, max(0, measured.activation_bytes)
        gradients, state = measured.gradients_bytes or 0, measured.optimizer_bytes or 0
        return cls(
            weights=weights,
            gradients=gradients,
            state=state,
            activations=activations,
            forward=peaks.forward_bytes - weights - state - activations,
            backward=peaks.backward_bytes - weights - state - max(activations, gradients),
            update=peaks.optimizer_bytes - weights - gradients - state,
            lost=max(0, (measured.reserved_bytes or 0) - measured.peak_bytes),
            passes_seconds=seconds - time.optimizer_seconds,
            update_seconds=time.optimizer_seconds,
        )

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return self.passes_seconds + self.update_seconds

    @property
    def phases(self) -> tuple[float, float, float]:
        """Peaks of the forward pass, the backward pass and the optimizer's step."""
        held = self.weights + self.state
        return (
            held + self.activations + self.forward,
            held + max(self.activations, self.gradients) + self.backward,
            held + self.gradients + self.update,
        )

    @property
    def bytes(self) -> float:
        """Bytes of the device's memory, with those lost between blocks."""
        return max(self.phases) + self.lost

    def to_lower(self, limit: int) -> frozenset[Change]:
        """Return the changes that lower a large enough part of the peaks above a limit."""
        found = frozenset[Change]()
        forward, backward, _ = (peak + self.lost > limit for peak in self.phases)
        least = _LEAST_SHARE * self.bytes
        if self.gradients + self.state + self.update > least:
            found |= OF_MODEL
        if (forward or backward) and self.activations + max(self.forward, self.backward) > least:
            found |= OF_SAMPLES
        return found


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
    def inverse(self) -> Effect | None:
        """The effect of leaving the choice out; None if too little is left of something to tell how much there was."""
        if min(self.factors) < _LEAST_FACTOR:
            return None
        return Effect(
            tuple(1 / factor for factor in self.factors),  # type: ignore[arg-type]
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
        self._memo: dict[Stack, tuple[int, Needs] | None] = {}

    def learn(self, stack: Stack, needs: Needs) -> None:
        """Note what a simulated stack needs."""
        self._simulated[stack] = needs
        self._know(stack)
        for other in [each for each in self._simulated if each - _stepping(each) == stack and each != stack]:
            self._know(other)

    def _know(self, stack: Stack) -> None:
        self.known[stack] = self._parted(stack, self._simulated[stack])
        self._memo.clear()
        for choice in stack:
            self._compare(choice, stack - {choice}, stack)
        for larger in [each for each in self.known if len(each) == len(stack) + 1 and stack < each]:
            (choice,) = larger - stack
            self._compare(choice, stack, larger)

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

    def _compare(self, choice: Choice, without: Stack, with_it: Stack) -> None:
        before, after = self.known.get(without), self.known.get(with_it)
        if before is not None and after is not None:
            self._effects.setdefault(choice, {})[without] = Effect.between(before, after)

    def knows(self, choice: Choice) -> bool:
        """Whether some simulation showed the effect of a choice."""
        return choice in self._effects

    def effect(self, choice: Choice, within: Stack = frozenset()) -> Effect:
        """Return the effect of a choice in the simulated stack most like ``within``; of equal ones, in the largest."""

        def likeness(seen: Stack) -> tuple[int, int]:
            shared = len(seen & within)
            return shared - len(seen - within), shared

        return self._effects[choice][max(self._effects[choice], key=likeness)]

    def of(self, stack: Stack) -> Needs | None:
        """Return the needs of a stack, simulated or predicted; None if a choice of it was never simulated."""
        found = self._anchored(stack)
        return None if found is None else found[1]

    def _anchored(self, stack: Stack) -> tuple[int, Needs] | None:
        """Return the needs of a stack, and how many choices it shares with the simulated stack that predicts them."""
        if stack in self.known:
            return len(stack), self.known[stack]
        if stack not in self._memo:
            found = (*self._from_smaller(stack), *self._from_larger(stack))
            self._memo[stack] = max(found, key=lambda each: each[0], default=None)
        return self._memo[stack]

    def _from_smaller(self, stack: Stack) -> Iterable[tuple[int, Needs]]:
        for choice in sorted(stack, key=lambda choice: choice.name):
            below = self._anchored(stack - {choice}) if self.knows(choice) else None
            if below is not None:
                yield below[0], self.effect(choice, stack).on(below[1])

    def _from_larger(self, stack: Stack) -> Iterable[tuple[int, Needs]]:
        for larger, needs in self.known.items():
            if len(larger) == len(stack) + 1 and stack < larger:
                (choice,) = larger - stack
                without = self.effect(choice, stack).inverse if self.knows(choice) else None
                if without is not None:
                    yield len(stack), without.on(needs)


def _stepping(stack: Stack) -> Stack:
    """Return the choices of a stack that step within the backward pass."""
    return frozenset(choice for choice in stack if choice.steps_within_backward)
