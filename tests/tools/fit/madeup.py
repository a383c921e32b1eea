"""Steps for the tests of fit, made up of what they need, and fits of plans with such steps."""

from __future__ import annotations

from collections.abc import Sequence

from actbench.machine import now, provenance
from actbench.model.blocks import BlockReading, BlockReadings
from actbench.model.estimated import EstimatedTime
from actbench.model.measured import Measurement, PhasePeaks
from actbench.model.meters import MeterName
from actbench.model.records import Case
from actbench.tools.fit.answer import Fitted, fitted
from actbench.tools.fit.records import Asked, FitRecord, Training

GIB = 1024**3
LIMIT = 100 * GIB
OTHER_UPDATES = Training(updates="other")
LAYERS = tuple(f"model.layers.{number}" for number in range(32))

Plan = tuple[str, float, int] | tuple[str, float, int, Training]


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


def readings(paths: Sequence[str]) -> BlockReadings:
    amounts = ("before_bytes", "after_bytes", "forward_peak_bytes", "backward_peak_bytes", "done_bytes", "output_bytes")
    blocks = tuple(BlockReading(path=path, kind="equal", **dict.fromkeys(amounts, 0)) for path in paths)
    return BlockReadings(blocks=blocks, start_bytes=0, stem_peak_bytes=0, top_peak_bytes=0, end_peak_bytes=0)


def found(*plans: Plan, exact: int = 20, max_slowdown: float = 2.0) -> Fitted:
    """Return a fit of plans, each with its seconds, the GiB of its activations, and how its training differs."""
    records = []
    for spec, seconds, activations, *training in (("exact", 1.0, exact), *plans):
        optimizer, scheme = spec.split() if " " in spec else ("adamw", spec)
        case = Case(model="m", batch_size=1, scheme=scheme, optimizer=optimizer, meter="simulated")
        outcome = measured([0, 0, 0, activations * GIB], seconds, 0.0, LIMIT)
        if spec == "exact":
            outcome = outcome.model_copy(update={"blocks": readings(LAYERS)})
        record = FitRecord(
            recipe="m",
            case=case,
            outcome=outcome,
            asked=Asked(optimizer="adamw", max_slowdown=max_slowdown),
            training=training[0] if training else Training(),
            recorded_at=now(),
            **provenance("actbench fit m"),
        )
        records.append(record)
    (only,) = fitted(records)
    return only


def record_of(scheme: str, limit: int, need: int, meter: MeterName = "simulated") -> FitRecord:
    """Return the record of a plan within a limit and with a need, both in GiB, of a fit in 100 GiB."""
    case = Case(model="tiny-llama", batch_size=1, scheme=scheme, optimizer="adamw", meter=meter)
    return FitRecord(
        recipe="m",
        case=case.model_copy(update={"memory_limit_bytes": limit * GIB}),
        outcome=measured([0, 0, 0, need * GIB], 1.0, 0.0, limit * GIB),
        asked=Asked(optimizer="adamw", limit_bytes=LIMIT),
        recorded_at=now(),
        **provenance("actbench fit tiny-llama"),
    )
