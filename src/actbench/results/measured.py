"""What a meter reads of a case. A field that is ``None`` was not, or could not be, read by that meter."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from actbench.results.records import Built, Case, Data, Failure, Migrations, Phase, Record, Site, Unreached
from actbench.results.timeline import Timeline
from actbench.units import NonNegativeFloat, NonNegativeInt, PositiveInt, SignedInt


class LargestBatch(Data):
    """How the largest batch was found and proved.

    Attributes:
        batch_size: The largest integer batch that fits; 0 when not even one sample does.
        predicted: What the simulation predicted, before anything was tried.
        fits_peak_bytes: Peak of the step at ``batch_size``.
        next_peak_bytes: Peak of the step at ``batch_size + 1``, where the meter could still read it.
        next_outcome: What happened at ``batch_size + 1``.
        trials: How many steps at distinct batch sizes were run or simulated, the prediction's not counted.
        estimated_step_seconds: How long a simulated step of ``batch_size`` would take.
    """

    batch_size: NonNegativeInt
    predicted: NonNegativeInt | None
    memory_limit_bytes: PositiveInt
    fits_peak_bytes: NonNegativeInt | None
    next_peak_bytes: NonNegativeInt | None = None
    next_outcome: Literal["out-of-memory", "over-limit", "not-tried"] = "out-of-memory"
    trials: NonNegativeInt
    estimated_step_seconds: NonNegativeFloat | None = None


class Mesh(Data):
    """How many processes train together along each axis.

    Attributes:
        dp: Data parallel: each has batches of its own.
        tp: Tensor parallel: they share the layers of one batch.
    """

    dp: PositiveInt = 1
    tp: PositiveInt = 1

    @property
    def size(self) -> int:
        """How many there are in all."""
        return self.dp * self.tp


class PeakParts(Data):
    """What the peak is made of; the parts add up to it.

    Attributes:
        activation_bytes: Made in the forward pass and alive at its end: what is saved for backward, and the loss.
        batch_bytes: The batch, and what modules hold from one step to the next.
        communication_bytes: Parameters gathered from other processes, and the buffers of what is gathered and reduced.
        temporary_bytes: The rest: what operators need for a moment, gradients on their way through the layers, and
            what is recomputed.
    """

    weights_bytes: NonNegativeInt = 0
    gradients_bytes: NonNegativeInt = 0
    optimizer_bytes: NonNegativeInt = 0
    activation_bytes: NonNegativeInt = 0
    batch_bytes: NonNegativeInt = 0
    communication_bytes: NonNegativeInt = 0
    temporary_bytes: NonNegativeInt = 0


OTHERS = "(others)"
"""All operators of a step that are not named, in one."""


class PhasePeaks(Data):
    """The peak of each part of a step by itself; the largest is that of the step."""

    forward_bytes: NonNegativeInt
    backward_bytes: NonNegativeInt
    optimizer_bytes: NonNegativeInt


class OperatorTime(Data):
    """What the calls of one operator take in a step, by estimate.

    Attributes:
        name: Of the operator; in parentheses what is none: the device waits, or all that is not named.
    """

    name: str
    calls: NonNegativeInt
    seconds: NonNegativeFloat
    flops: NonNegativeInt = 0
    moved_bytes: NonNegativeInt = 0


class EstimatedTime(Data):
    """How long a simulated step would take on the device that it stands for; nothing of it was measured.

    Attributes:
        step_seconds: The sum of the next three.
        host_seconds: What the host needs to issue the operators; where that is more, the device waits.
        device_seconds: What the device computes.
        flops: Floating-point operations of the products.
        moved_bytes: Bytes that operators read and write.
        by_operator: The dearest first.
        unknown: Operators that the cost model has no kind for, counted by their bytes.
    """

    step_seconds: NonNegativeFloat
    forward_seconds: NonNegativeFloat
    backward_seconds: NonNegativeFloat
    optimizer_seconds: NonNegativeFloat
    host_seconds: NonNegativeFloat
    device_seconds: NonNegativeFloat
    flops: NonNegativeInt
    moved_bytes: NonNegativeInt
    by_operator: tuple[OperatorTime, ...] = ()
    unknown: tuple[str, ...] = ()


class Diagnostic(Data):
    """A number that a scheme reports beyond what all do; tables show it in a column of its own.

    Attributes:
        name: Of the column in CSV, data frames and ``--columns``.
        title: What people read above it.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,60}$")]
    title: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9 ,/-]{0,60}$")]
    value: float


FIRST_DIAGNOSTICS = {
    "sketch_variance_predicted": "Variance, predicted",
    "sketch_variance_observed": "Variance, observed",
    "quantization_variance_observed": "Variance, rounding",
    "sgd_variance": "Variance, SGD",
}
"""Titles of those that older records have as fields of the measurement."""


class Measurement(Data):
    """What a meter read of one case.

    Attributes:
        weights_bytes: Parameters and buffers.
        gradients_bytes: Gradients of the parameters at the end of backward.
        optimizer_bytes: Optimizer state.
        activation_bytes: Bytes live after forward minus bytes live before it.
        peak_bytes: Peak allocated in one training step, everything included. The headline.
        rank_peak_bytes: The peak of each process, by rank, where several trained together: the largest is
            ``peak_bytes``, and all other bytes are those of its process; empty for one process.
        peak_phase: Part of the step in which the peak is reached.
        peak_parts: What the peak is made of.
        phase_peaks: The peak of each part of the step (simulated); None in older records.
        memory_limit_bytes: What a step might use: the limit of the case, or what the device has.
        over_limit_bytes: How much more than that it needs, where the meter can go on past the limit; None where it
            fits. More than ``peak_bytes`` says where memory is lost between the blocks of CUDA's allocator.
        reserved_bytes: Peak reserved by the allocator's pool (CUDA).
        process_bytes: What the driver says the process holds (CUDA, by NVML).
        step_seconds: Seconds of each timed step.
        estimated: How long a simulated step would take; None of other meters, of devices without rates and in older
            records.
        untimed: Why the time of a simulated step is not estimated.
        simulated: What kind of device a simulated step was run for; None of other meters and in older records.
        timing_round: What the group of cases that took turns with this one is called; None in older records.
        exact_step_seconds: Seconds of the exact model's steps in the same rounds, where its own record is of others.
        gradient_error: Relative L2 error of the gradient of all parameters against the exact model's.
        diagnostics: What the scheme reports of itself.
        mesh: The processes that train together; bytes are those of one of them, the first. None for one alone.
        dtype: Types of the parameters, that with the most bytes first: ``bfloat16+float32``; None in older records.
        optimizer: Class of the optimizer; None in older records.
        built: What was measured; None in older records.
        timeline: The memory over the step, where it was asked for.
    """

    model_config = ConfigDict(extra="allow")  # for _diagnosed, which refuses all but the fields of older records

    kind: Literal["measured"] = "measured"
    weights_bytes: NonNegativeInt
    gradients_bytes: NonNegativeInt | None = None
    optimizer_bytes: NonNegativeInt | None = None
    activation_bytes: SignedInt
    peak_bytes: NonNegativeInt
    rank_peak_bytes: tuple[NonNegativeInt, ...] = ()
    peak_phase: Phase | None = None
    peak_parts: PeakParts | None = None
    phase_peaks: PhasePeaks | None = None
    memory_limit_bytes: PositiveInt | None = None
    over_limit_bytes: PositiveInt | None = None
    reserved_bytes: NonNegativeInt | None = None
    process_bytes: NonNegativeInt | None = None
    step_seconds: tuple[float, ...] | None = None
    estimated: EstimatedTime | None = None
    untimed: str | None = None
    simulated: Literal["cpu", "cuda"] | None = None
    timing_round: str | None = None
    exact_step_seconds: tuple[float, ...] | None = None
    largest_batch: NonNegativeInt | None = None
    largest_batch_search: LargestBatch | None = None
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    loss: float | None = None
    mesh: Mesh | None = None
    dtype: str | None = None
    optimizer: str | None = None
    weights_origin: str = "random"
    built: Built | None = None
    sites: tuple[Site, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    warnings: tuple[str, ...] = ()
    timeline: Timeline | None = None

    @model_validator(mode="after")  # one before costs a third of the time of reading
    def _diagnosed(self) -> Self:
        others = self.__pydantic_extra__
        if others:
            if unknown := others.keys() - FIRST_DIAGNOSTICS.keys():
                raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
            moved = (_moved(name, value) for name, value in others.items() if value is not None)
            self.__dict__["diagnostics"] = (*self.diagnostics, *moved)
            others.clear()
        return self

    def diagnostic(self, name: str) -> float | None:
        """Return a number that the scheme reports; None where it does not."""
        return next((each.value for each in self.diagnostics if each.name == name), None)

    @property
    def batches(self) -> int:
        """How many batches a step takes at once: each data-parallel process has its own."""
        return self.mesh.dp if self.mesh else 1

    @property
    def fits(self) -> bool:
        """Whether the step needs no more than it might use."""
        return self.over_limit_bytes is None


def _moved(name: str, value: Any) -> Diagnostic:
    try:
        return Diagnostic(name=name, title=FIRST_DIAGNOSTICS[name], value=value)
    except ValidationError:
        raise ValueError(f"{name}: {value!r:.40} is no number") from None


Outcome = Annotated[Measurement | Failure, Field(discriminator="kind")]


class MeasuredRecord(Record[Case, Outcome]):
    """One line of the results file of a sweep."""

    migrations: ClassVar[Migrations] = {}
