"""What a training step needs, in parts that schemes change one by one; shorter copies of a deep model tell it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actbench import scheme as schemes
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case
from actbench.scheme.base import Change
from actbench.scheme.composed import parts_in
from actbench.scheme.facets import Periodic
from actbench.tools.fit.choices import OF_MODEL, OF_SAMPLES, Stack, case_of
from actbench.tools.fit.records import step_seconds_of
from actbench.workload.names import with_blocks

_LEAST_SHARE = 0.03  # share of a peak; a smaller part is not worth lowering
_DEEP = 16  # blocks; of fewer, the model itself takes hardly longer than its copies
_WORTH = 4  # copies are simulated if the model has so many times the blocks of the longer one
_TRUSTED = 0.02  # share of the exact step's peak and time by which its copies may be wrong


class _Totals(NamedTuple):
    """Bytes and seconds of a step, each of which is proportional to the number of equal blocks, but for a constant."""

    weights: float
    gradients: float
    state: float
    activations: float
    forward_peak: float
    backward_peak: float
    update_peak: float
    passes_seconds: float
    update_seconds: float


def _totals(measured: Measurement) -> _Totals | None:
    peaks, time, seconds = measured.phase_peaks, measured.estimated, step_seconds_of(measured)
    if peaks is None or time is None or seconds is None:
        return None
    return _Totals(
        measured.weights_bytes,
        measured.gradients_bytes or 0,
        measured.optimizer_bytes or 0,
        max(0, measured.activation_bytes),
        peaks.forward_bytes,
        peaks.backward_bytes,
        peaks.optimizer_bytes,
        seconds - time.optimizer_seconds,
        time.optimizer_seconds,
    )


def _lost(measured: Measurement) -> int:
    return max(0, (measured.reserved_bytes or 0) - measured.peak_bytes)


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
        totals = _totals(measured)
        return None if totals is None else cls._from_totals(totals, _lost(measured))

    @classmethod
    def extended(cls, short: tuple[int, Measurement], long: tuple[int, Measurement], blocks: int) -> Needs | None:
        """Return the needs of a model of equal blocks from those of two models with fewer, each with their number.

        All grows by the same from block to block, but for the bytes that the allocator loses: those are the longer
        model's. None if one of the two has no estimated time.
        """
        (few, less), (more, larger) = short, long
        low, high = _totals(less), _totals(larger)
        if low is None or high is None:
            return None
        share = (blocks - more) / (more - few)
        totals = _Totals(*(max(0.0, b + share * (b - a)) for a, b in zip(low, high, strict=True)))
        return cls._from_totals(totals, _lost(larger))

    @classmethod
    def _from_totals(cls, found: _Totals, lost: float) -> Needs:
        held = found.weights + found.state
        return cls(
            weights=found.weights,
            gradients=found.gradients,
            state=found.state,
            activations=found.activations,
            forward=found.forward_peak - held - found.activations,
            backward=found.backward_peak - held - max(found.activations, found.gradients),
            update=found.update_peak - held - found.gradients,
            lost=lost,
            passes_seconds=found.passes_seconds,
            update_seconds=found.update_seconds,
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
    def peak(self) -> float:
        """Bytes of the largest phase."""
        return max(self.phases)

    @property
    def bytes(self) -> float:
        """Bytes of the device's memory, with those lost between blocks."""
        return self.peak + self.lost

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


@dataclass(frozen=True)
class Copies:
    """Two copies of a model of ``blocks`` equal blocks, with fewer; they say which stacks to simulate on the model."""

    exact: Case
    blocks: int

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """Return the cases of a stack on both copies; none if it names modules, or if the model itself is as short."""
        case = case_of(stack, self.exact)
        return tuple(case.model_copy(update={"model": with_blocks(case.model, count)}) for count in self._counts(case))

    def needs(self, stack: Stack, outcomes: Sequence[Outcome]) -> Needs | None:
        """Return what a stack needs on the whole model, from the outcomes of its cases; None if one of them failed."""
        short, long = outcomes
        if not (isinstance(short, Measurement) and isinstance(long, Measurement)):
            return None
        few, more = self._counts(case_of(stack, self.exact))
        return Needs.extended((few, short), (more, long), self.blocks)

    def _counts(self, case: Case) -> tuple[int, ...]:
        scheme = schemes.build(case.scheme)
        if any(part.only for part in parts_in(scheme)):  # it names modules of one model
            return ()
        periodic = scheme.facet(Periodic)
        few = 1 if periodic is None else periodic.blocks
        return (few, 2 * few) if max(_DEEP, _WORTH * 2 * few) <= self.blocks else ()


def agree(told: Needs, found: Needs) -> bool:
    """Whether what the copies told of the exact step is what its simulation found."""
    pairs = ((told.peak, found.peak), (told.seconds, found.seconds))
    return all(abs(one - other) <= _TRUSTED * other for one, other in pairs)
