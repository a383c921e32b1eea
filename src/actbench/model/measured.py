"""What a meter reads of a case. A field is ``None`` if the meter did not, or cannot, read it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from actbench.display import Displayed
from actbench.model.blocks import BlockReadings
from actbench.model.data import Data, OutcomeData, StoredData, shared
from actbench.model.estimated import Communication, EstimatedTime
from actbench.model.records import Built, Case, Failure, Migrations, Phase, Record, Site, Unreached
from actbench.model.timeline import Timeline
from actbench.units import NonNegativeFloat, NonNegativeInt, PositiveInt, SignedInt, format_bytes


class LargestBatch(Data):
    """How the largest batch was found and proved.

    Attributes:
        batch_size: The largest batch that fits; 0 if not even one sample does.
        predicted: The prediction of the simulation, before any trial.
        fits_peak_bytes: Peak of the step at ``batch_size``.
        next_peak_bytes: Peak of the step at ``batch_size + 1``, if the meter could still read it.
        next_outcome: What happened at ``batch_size + 1``.
        trials: How many batch sizes were run or simulated, without those of the prediction.
        estimated_step_seconds: Estimated time of a simulated step of ``batch_size``.
    """

    batch_size: NonNegativeInt
    predicted: NonNegativeInt | None
    memory_limit_bytes: PositiveInt
    fits_peak_bytes: NonNegativeInt | None
    next_peak_bytes: NonNegativeInt | None = None
    next_outcome: Literal["out-of-memory", "over-limit", "not-tried"] = "out-of-memory"
    trials: NonNegativeInt
    estimated_step_seconds: NonNegativeFloat | None = None


class Advised(Data):
    """What is known of a script's next questions, from more simulations of it.

    Attributes:
        scheme: The remedy that was simulated; None for none.
        needed_bytes: What a step needs with it.
        over_limit_bytes: Bytes that it still lacks; None if it fits.
        step_seconds: Estimated time of a step with it.
        largest_batch: The largest batch of the unchanged script that fits, 0 if not one row does; None if unknown. Of a
            whole run that of which steps, the largest too, fit.
        is_slow: Whether a simulation takes so long that none was made, or that it was ended.
        is_search_slow: Whether the search for the largest batch was ended by its time.
        fitting_batch: The largest batch that this search has seen fit; None for none.
        limit_seconds: After how long a simulation was ended; None in older records.
        is_full: Whether simulations were given all the time of the case.
    """

    scheme: str | None = None
    needed_bytes: NonNegativeInt | None = None
    over_limit_bytes: PositiveInt | None = None
    step_seconds: NonNegativeFloat | None = None
    largest_batch: NonNegativeInt | None = None
    is_slow: bool = False
    is_search_slow: bool = False
    fitting_batch: PositiveInt | None = None
    limit_seconds: NonNegativeFloat | None = None
    is_full: bool = False


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


OF_MODEL = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
"""Fields of :class:`PeakParts` that do not depend on the batch."""


class PeakParts(StoredData):
    """What the peak is made of; the parts add up to it.

    Attributes:
        activation_bytes: Made in the forward pass and alive at its end: what is saved for backward, and the loss.
        batch_bytes: The batch, and what modules hold from one step to the next.
        kept_bytes: What a script still holds of earlier steps: lists of outputs, losses with their graphs.
        communication_bytes: Parameters gathered from other processes, and the buffers of what is gathered and reduced.
        cache_bytes: Keys and values of earlier tokens, while a model writes.
        engine_bytes: What an inference engine in the same process takes of the card, such as vLLM.
        temporary_bytes: The rest: what operators need for a moment, gradients on their way through the layers, and
            what is recomputed.
    """

    weights_bytes: NonNegativeInt = 0
    gradients_bytes: NonNegativeInt = 0
    optimizer_bytes: NonNegativeInt = 0
    activation_bytes: NonNegativeInt = 0
    batch_bytes: NonNegativeInt = 0
    kept_bytes: NonNegativeInt = 0
    communication_bytes: NonNegativeInt = 0
    cache_bytes: NonNegativeInt = 0
    engine_bytes: NonNegativeInt = 0
    temporary_bytes: NonNegativeInt = 0

    @property
    def model_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state, which do not depend on the batch."""
        return sum(getattr(self, name) for name in OF_MODEL)

    @property
    def are_mostly_model(self) -> bool:
        """Whether they are more than half of the peak."""
        return bool(2 * self.model_bytes > sum(self.model_dump().values()))

    def are_of_optimizer(self, phase: Phase) -> bool:
        """Whether its state, and in its own part of the step its temporaries, are a tenth of the peak."""
        needed = self.optimizer_bytes + (self.temporary_bytes if phase == "optimizer" else 0)
        return bool(10 * needed >= sum(self.model_dump().values()))


class PhasePeaks(StoredData):
    """The peak of each part of a step; the largest is the peak of the step."""

    forward_bytes: NonNegativeInt
    backward_bytes: NonNegativeInt
    optimizer_bytes: NonNegativeInt


class Generated(Data):
    """What a generation needs beside the common fields.

    Attributes:
        cache_bytes: The cache at its full length.
        prefill_bytes: Peak while the prompt is read; None for meters that do not tell parts.
        generation_bytes: Peak while tokens are written; None as for ``prefill_bytes``.
        longest_prompt: The longest prompt with which the same number of rows and of written tokens fits, if it was
            searched; 0 if none fits.
        prefill_seconds: Estimated time of the prefill; None for other meters and devices without rates.
        token_seconds: Estimated time of a token after the first: the mean of the first pass after the prefill and of
            the last one, between which the cache grows.
    """

    cache_bytes: NonNegativeInt
    prefill_bytes: NonNegativeInt | None = None
    generation_bytes: NonNegativeInt | None = None
    longest_prompt: NonNegativeInt | None = None
    prefill_seconds: NonNegativeFloat | None = None
    token_seconds: NonNegativeFloat | None = None


class Diagnostic(Data):
    """A number that a scheme reports beyond the common fields; tables show it in its own column.

    Attributes:
        name: Name of the column in CSV and data frames; ``--columns`` knows the titles of those of actbench alone.
        title: Heading of the column.
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
"""Titles of the diagnostics that older records have as fields of the measurement."""


GrowthKind = Literal["container", "graph", "library", "cycle"]


class Growth(Data):
    """Memory that each step of a script leaves on its device for good, or until Python's collector runs.

    Attributes:
        kind: What keeps it: a ``container`` of the script, the ``graph`` behind its losses, an object of a ``library``,
            or a ``cycle`` of references; None if that is not known, and in older records.
        step_bytes: How much each step leaves, at least.
        more_steps: After how many more steps the device is full; None if its memory is unknown.
        line: The line of the script that made most of it, if it is known.
        keeper: The line that keeps it, or the variable where no line fills one; None if neither is known, and in older
            records.
    """

    kind: GrowthKind | None = None
    step_bytes: PositiveInt
    more_steps: NonNegativeInt | None = None
    line: str | None = None
    keeper: str | None = None

    @property
    def is_lasting(self) -> bool:
        """Whether nothing but the script can free it: Python's collector frees cycles, sooner or later."""
        return self.kind != "cycle"


RemedyName = Literal["zero_grad", "set_to_none", "del", "expandable_segments", "empty_cache"]


class Remedy(Data):
    """A change of a script that lets its steps need less and costs nothing.

    Attributes:
        kind: ``zero_grad``: drop gradients before the forward pass; ``set_to_none``: drop them in place of filling them
            with zeros; ``del``: drop what a line made after its last use; ``expandable_segments``: of the allocator;
            ``empty_cache``: give back what the allocator has cached, before and after evaluations.
        line: The line of the script that made what is dropped, or that begins the evaluation; None of gradients and of
            the allocator.
        saved_bytes: How much less the step needs, after the remedies before it.
    """

    kind: RemedyName
    line: str | None = None
    saved_bytes: PositiveInt


RunPart = Literal[
    "first step", "step", "last step", "next step", "resumed step", "evaluation", "generation", "save", "load", "resume"
]


class RunEvent(Data):
    """What one part of a script's whole run needs.

    Attributes:
        part: ``last step`` is that of an epoch in which memory grows, ``next step`` the first one after an evaluation,
            and ``resumed step`` that after a ``resume``, a load of an optimizer's state.
        line: The line of the script that began it; None of steps.
        count: How many times it was seen; the bytes are those of the largest.
        reserved_bytes: Most bytes that the allocator had of the card meanwhile; None for other devices.
        over_limit_bytes: Bytes needed beyond the memory limit; None if it fits.
        expected_bytes: What it needs where half of what only a real run knows is chosen; None as of the measurement.
        batches: How many batches it has in the real run, if it was cut short: the bytes are then those of the real run,
            as far as memory grows from batch to batch.
        batch_bytes: What each batch of an evaluation leaves until its end; 0 if nothing, None of other parts.
        has_graph: Whether an evaluation records gradients.
    """

    part: RunPart
    line: str | None = None
    count: PositiveInt = 1
    peak_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt | None = None
    over_limit_bytes: PositiveInt | None = None
    expected_bytes: NonNegativeInt | None = None
    batches: PositiveInt | None = None
    batch_bytes: NonNegativeInt | None = None
    has_graph: bool = False

    @property
    def needed_bytes(self) -> int:
        """Bytes of the device that it needs: its peak, or the reserved bytes if known and larger."""
        return max(self.peak_bytes, self.reserved_bytes or 0)

    @property
    def is_step(self) -> bool:
        """Whether it is a training step."""
        return self.part in ("first step", "step", "last step", "next step", "resumed step")


class Measurement(Displayed, OutcomeData):
    """What a meter read of one case.

    Attributes:
        weights_bytes: Parameters and buffers.
        gradients_bytes: Gradients of the parameters at the end of backward.
        optimizer_bytes: Optimizer state.
        activation_bytes: Bytes live after forward minus bytes live before it.
        peak_bytes: Peak allocated in one training step, everything included. The headline.
        rank_peak_bytes: The peak of each process, by rank, where several trained together: the largest is
            ``peak_bytes``, and all other bytes are those of its process; empty for one process.
        at_most: Why the peak may be less, each reason with its line of the script; empty if the peak is not only an
            upper bound.
        expected_bytes: What a step needs, of a whole run its largest part, where half of what only a real run knows is
            chosen; None where nothing is ``at_most``, or where that was not simulated.
        approximate: Why a simulated peak is an estimate; empty where every buffer of the step is followed.
        peak_phase: Part of the step in which the peak is reached.
        peak_parts: What the peak is made of.
        remedies: A few schemes that may lower such a peak, for messages; empty in older records.
        phase_peaks: The peak of each part of the step (simulated); None in older records.
        generated: The cache and the parts of a generation; None of training steps.
        memory_limit_bytes: Memory that a step may use: the limit of the case, or what the device has for a step; of a
            simulated card that is what a CUDA context leaves (in older records, all of it).
        over_limit_bytes: Bytes needed beyond this limit, if the meter can go on past it; None if the step fits. It
            exceeds ``peak_bytes`` minus the limit if memory is lost between the blocks of CUDA's allocator.
        growth: What each step of a script leaves, for good or in cycles; None if its memory does not grow, and in older
            records.
        free_remedies: What lets a script's steps need less and costs nothing; empty in older records.
        events: What each part of a script's whole run needs, in order; empty where only steps were run.
        reserved_bytes: Peak reserved by the allocator's pool (CUDA).
        script_peak_bytes: Most bytes allocated since a simulated script began, before and between its steps too; None
            for others and in older records.
        host_bytes: Most bytes that a step holds in host memory, which are no part of the peak (of simulated CUDA
            devices): what schemes put there, and step counters of optimizers.
        process_bytes: Memory of the process by the driver (CUDA, by NVML).
        step_seconds: Seconds of each timed step.
        estimated: Estimated time of a simulated step; None for other meters and devices without rates.
        communication: What one process of several sends in a simulated step; None for a single process and other
            meters.
        untimed: Why the time of a simulated step is not estimated.
        simulated: Kind of the simulated device; None for other meters and in older records.
        timing_round: Name of the group of cases that took turns with this one; None in older records.
        exact_step_seconds: Seconds of the exact model's steps in the same rounds, if its own record has other rounds.
        advised: What the best remedy needs and how large a batch fits, of scripts that run alone; None for others.
        gradient_error: Relative L2 error of the gradient of all parameters against the exact model's.
        diagnostics: What the scheme reports of itself.
        mesh: The processes that train together; bytes are those of one process: a rank with the largest peak if all
            were measured, the first if they are simulated. None for a single process.
        dtype: Types of the parameters, that with the most bytes first: ``bfloat16+float32``; None in older records.
        autocast: The types in which a script's own autocast computes; None without one and in older records.
        optimizer: Class of the optimizer; None in older records.
        built: What was measured; None in older records.
        timeline: The memory over the step, if requested.
        blocks: What each block holds and takes, if requested of a simulated step.
        trace: The same step as a value, packed as :class:`actbench.simulator.trace.Trace` packs it.
    """

    model_config = ConfigDict(extra="allow")  # _diagnosed refuses extra fields, except those of older records

    kind: Literal["measured"] = "measured"
    weights_bytes: NonNegativeInt
    gradients_bytes: NonNegativeInt | None = None
    optimizer_bytes: NonNegativeInt | None = None
    activation_bytes: SignedInt
    peak_bytes: NonNegativeInt
    rank_peak_bytes: tuple[NonNegativeInt, ...] = ()
    at_most: tuple[str, ...] = ()
    expected_bytes: NonNegativeInt | None = None
    approximate: tuple[str, ...] = ()
    peak_phase: Phase | None = None
    peak_parts: PeakParts | None = None
    remedies: tuple[str, ...] = ()
    phase_peaks: PhasePeaks | None = None
    generated: Generated | None = None
    memory_limit_bytes: PositiveInt | None = None
    over_limit_bytes: PositiveInt | None = None
    growth: Growth | None = None
    free_remedies: tuple[Remedy, ...] = ()
    events: tuple[RunEvent, ...] = ()
    reserved_bytes: NonNegativeInt | None = None
    script_peak_bytes: NonNegativeInt | None = None
    host_bytes: NonNegativeInt | None = None
    process_bytes: NonNegativeInt | None = None
    step_seconds: tuple[float, ...] | None = None
    estimated: EstimatedTime | None = None
    communication: tuple[Communication, ...] | None = None
    untimed: str | None = None
    simulated: Literal["cpu", "cuda"] | None = None
    timing_round: str | None = None
    exact_step_seconds: tuple[float, ...] | None = None
    largest_batch: NonNegativeInt | None = None
    largest_batch_search: LargestBatch | None = None
    advised: Advised | None = None
    gradient_error: float | None = None
    gradient_cosine: float | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    loss: float | None = None
    mesh: Mesh | None = None
    dtype: str | None = None
    autocast: str | None = None
    optimizer: str | None = None
    weights_origin: str = "random"
    built: Annotated[Built, AfterValidator(shared)] | None = None
    sites: tuple[Site, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    warnings: tuple[str, ...] = ()
    timeline: Timeline | None = None
    blocks: BlockReadings | None = None
    trace: str | None = None

    @model_validator(mode="after")  # mode="before" takes a third of the time of reading
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
        """Return a number that the scheme reports, or None."""
        return next((each.value for each in self.diagnostics if each.name == name), None)

    @property
    def batches(self) -> int:
        """How many batches a step takes at once: each data-parallel process has its own."""
        return self.mesh.dp if self.mesh else 1

    @property
    def fits(self) -> bool:
        """Whether the step fits into its memory limit."""
        return self.over_limit_bytes is None

    @property
    def worst(self) -> RunEvent | None:
        """The part of a whole run that lacks most memory, or else needs most; None where only steps were run."""
        return max(self.events, key=lambda each: (each.over_limit_bytes or 0, each.needed_bytes), default=None)

    @property
    def lacks_memory(self) -> bool:
        """Whether a step, or another part of the run, needs more than there is."""
        return not self.fits or any(each.over_limit_bytes for each in self.events)

    @property
    def runs_out(self) -> bool:
        """Whether memory is expected to run out: in a step, elsewhere in the run, or as each step leaves more."""
        return self.lacks_memory or (self.growth is not None and self.growth.is_lasting)

    @property
    def state(self) -> str:
        """Whether the step fits."""
        return "measured" if self.fits else OVER_THE_LIMIT

    @property
    def ending(self) -> str:
        """The peak, by how much it is over the limit, and the largest batch; of a whole run that of its worst part."""
        worst = self.worst
        peak, reserved, over_bytes = self.peak_bytes, self.reserved_bytes, self.over_limit_bytes
        if worst is not None:
            peak, reserved, over_bytes = worst.peak_bytes, worst.reserved_bytes, worst.over_limit_bytes
        largest = "" if self.largest_batch is None else f", largest batch {self.largest_batch}"
        gaps = f", {format_bytes(reserved)} reserved" if over_bytes and reserved and reserved > peak else ""
        over = f", over the limit by {format_bytes(over_bytes)}" if over_bytes else ""
        part = "" if worst is None else f" ({worst.part})"
        return f"peak {format_bytes(peak)}{part}{gaps}{over}{largest}"

    def __repr__(self) -> str:
        """Return the main figures; ``model_dump()`` returns all that was read."""
        return f"<Measurement: {self.ending}>"

    __str__ = __repr__


OVER_THE_LIMIT = "over the limit"


def _moved(name: str, value: Any) -> Diagnostic:
    try:
        return Diagnostic(name=name, title=FIRST_DIAGNOSTICS[name], value=value)
    except ValidationError:
        raise ValueError(f"{name}: {value!r:.40} is not a number") from None


Outcome = Annotated[Measurement | Failure, Field(discriminator="kind")]


LARGEST_THAT_FITS, UNKNOWN_LARGEST = "the largest batch that fits is", "the largest batch is unknown"
"""How a warning, or the message of a row that ran out of memory, says what came of the search for its largest batch."""


class MeasuredRecord(Record[Case, Outcome]):
    """One line of the results file of a sweep."""

    migrations: ClassVar[Migrations] = {}

    @property
    def awaits_search(self) -> bool:
        """Whether all is known but the largest batch: its search was still to come, or was interrupted."""
        found = self.outcome
        if isinstance(found, Failure):
            told, is_open = found.message, found.reason == "out-of-memory" and self.case.meter != "simulated"
        else:
            told, is_open = "; ".join(found.warnings), found.largest_batch is None
        return self.case.find_largest_batch and is_open and not (LARGEST_THAT_FITS in told or UNKNOWN_LARGEST in told)
