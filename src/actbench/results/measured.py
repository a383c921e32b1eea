"""What a meter reads of a case. A field that is ``None`` was not, or could not be, read by that meter."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from actbench.results.records import Built, Case, Data, Failure, Migrations, Record, Site, Unreached
from actbench.units import NonNegativeInt, PositiveInt, SignedInt


class LargestBatch(Data):
    """How the largest batch was found and proved.

    Attributes:
        batch_size: The largest integer batch that fits; 0 when not even one sample does.
        predicted: What the simulation predicted, before anything was tried.
        fits_peak_bytes: Peak of the step at ``batch_size``.
        next_peak_bytes: Peak of the step at ``batch_size + 1``, where the meter could still read it.
        next_outcome: What happened at ``batch_size + 1``.
        trials: How many steps at distinct batch sizes were run or simulated, the prediction's not counted.
    """

    batch_size: NonNegativeInt
    predicted: NonNegativeInt | None
    memory_limit_bytes: PositiveInt
    fits_peak_bytes: NonNegativeInt | None
    next_peak_bytes: NonNegativeInt | None = None
    next_outcome: Literal["out-of-memory", "over-limit", "not-tried"] = "out-of-memory"
    trials: NonNegativeInt


class Measurement(Data):
    """What a meter read of one case.

    Attributes:
        weights_bytes: Parameters and buffers.
        gradients_bytes: Gradients of the parameters at the end of backward.
        optimizer_bytes: Optimizer state.
        activation_bytes: Bytes live after forward minus bytes live before it.
        peak_bytes: Peak allocated in one training step, everything included. The headline.
        reserved_bytes: Peak reserved by the allocator's pool (CUDA).
        process_bytes: What the driver says the process holds (CUDA, by NVML).
        step_seconds: Seconds of each timed step.
        timing_round: What the group of cases that took turns with this one is called; None in older records.
        exact_step_seconds: Seconds of the exact model's steps in the same rounds, where its own record is of others.
        gradient_error: Relative L2 error of the gradient of all parameters against the exact model's.
        sketch_variance_predicted: Variance of the sketched weights' gradient over its exact squared length, by formula.
        sketch_variance_observed: The same as seen over a few sketches.
        quantization_variance_observed: The same of rounding and the gradient of all parameters, over a few draws.
        sgd_variance: The variance that the same gradient has from the choice of the batch's rows, relative to the same.
        dtype: Types of the parameters, that with the most bytes first: ``bfloat16+float32``; None in older records.
        optimizer: Class of the optimizer; None in older records.
        built: What was measured; None in older records.
    """

    kind: Literal["measured"] = "measured"
    weights_bytes: NonNegativeInt
    gradients_bytes: NonNegativeInt | None = None
    optimizer_bytes: NonNegativeInt | None = None
    activation_bytes: SignedInt
    peak_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt | None = None
    process_bytes: NonNegativeInt | None = None
    step_seconds: tuple[float, ...] | None = None
    timing_round: str | None = None
    exact_step_seconds: tuple[float, ...] | None = None
    largest_batch: NonNegativeInt | None = None
    largest_batch_search: LargestBatch | None = None
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    sketch_variance_predicted: float | None = None
    sketch_variance_observed: float | None = None
    quantization_variance_observed: float | None = None
    sgd_variance: float | None = None
    loss: float | None = None
    dtype: str | None = None
    optimizer: str | None = None
    weights_origin: str = "random"
    built: Built | None = None
    sites: tuple[Site, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    warnings: tuple[str, ...] = ()


Outcome = Annotated[Measurement | Failure, Field(discriminator="kind")]


class MeasuredRecord(Record[Case, Outcome]):
    """One line of the results file of a sweep."""

    migrations: ClassVar[Migrations] = {}
