"""What a training step needs, in parts that schemes change one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from actbench.fitting.choices import OF_MODEL, OF_SAMPLES
from actbench.results.fits import step_seconds_of
from actbench.results.measured import Measurement
from actbench.schemes.base import Change

_LEAST_SHARE = 0.03  # share of a peak; a smaller part is not worth lowering


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


def _reserved(measured: Measurement) -> int:
    return measured.reserved_bytes or 0


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
        return None if totals is None else cls._from_totals(totals, max(0, _reserved(measured) - measured.peak_bytes))

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
        return cls._from_totals(totals, max(0, _reserved(larger) - larger.peak_bytes))

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
