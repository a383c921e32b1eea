"""Steps for the tests of fit, made up of what they need."""

from __future__ import annotations

from collections.abc import Sequence

from actbench.model.estimated import EstimatedTime
from actbench.model.measured import Measurement, PhasePeaks

GIB = 1024**3


def measured(
    held: Sequence[int], passes: float, step: float, limit: int, beyond: tuple[int, int, int] = (0, 0, 0)
) -> Measurement:
    """Return a step that holds weights, gradients, state and activations, and ``beyond`` them so much in each phase."""
    weights, gradients, state, activations = held
    forward, update = weights + state + activations + beyond[0], weights + gradients + state + beyond[2]
    backward = weights + state + max(activations, gradients) + beyond[1]
    peak = max(forward, backward, update)
    return Measurement(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=state,
        activation_bytes=activations,
        peak_bytes=peak,
        phase_peaks=PhasePeaks(forward_bytes=forward, backward_bytes=backward, optimizer_bytes=update),
        memory_limit_bytes=limit,
        over_limit_bytes=peak - limit if peak > limit else None,
        estimated=EstimatedTime(
            step_seconds=passes + step,
            forward_seconds=passes / 3,
            backward_seconds=2 * passes / 3,
            optimizer_seconds=step,
            host_seconds=0,
            device_seconds=passes + step,
            flops=0,
            moved_bytes=0,
        ),
    )
