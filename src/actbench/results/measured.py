"""What a meter reads of a case. A field that is ``None`` was not, or could not be, read by that meter."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from actbench.results.records import Built, Case, Data, Failure, Migrations, Phase, Record, Site, Unreached
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


class PeakParts(Data):
    """What the peak is made of; the parts add up to it.

    Attributes:
        activation_bytes: Made in the forward pass and alive at its end: what is saved for backward, and the loss.
        batch_bytes: The batch, and what modules hold from one step to the next.
        temporary_bytes: The rest: what operators need for a moment, gradients on their way through the layers, and
            what is recomputed.
    """

    weights_bytes: NonNegativeInt = 0
    gradients_bytes: NonNegativeInt = 0
    optimizer_bytes: NonNegativeInt = 0
    activation_bytes: NonNegativeInt = 0
    batch_bytes: NonNegativeInt = 0
    temporary_bytes: NonNegativeInt = 0


class Measurement(Data):
    """What a meter read of one case.

    Attributes:
        weights_bytes: Parameters and buffers.
        gradients_bytes: Gradients of the parameters at the end of backward.
        optimizer_bytes: Optimizer state.
        activation_bytes: Bytes live after forward minus bytes live before it.
        peak_bytes: Peak allocated in one training step, everything included. The headline.
        peak_phase: Part of the step in which the peak is reached.
        peak_parts: What the peak is made of.
        memory_limit_bytes: What a step might use: the limit of the case, or what the device has.
        over_limit_bytes: How much more than that it needs, where the meter can go on past the limit; None where it
            fits. More than ``peak_bytes`` says where memory is lost between the blocks of CUDA's allocator.
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
    peak_phase: Phase | None = None
    peak_parts: PeakParts | None = None
    memory_limit_bytes: PositiveInt | None = None
    over_limit_bytes: PositiveInt | None = None
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

    @property
    def fits(self) -> bool:
        """Whether the step needs no more than it might use."""
        return self.over_limit_bytes is None


Outcome = Annotated[Measurement | Failure, Field(discriminator="kind")]


class MeasuredRecord(Record[Case, Outcome]):
    """One line of the results file of a sweep."""

    migrations: ClassVar[Migrations] = {}
