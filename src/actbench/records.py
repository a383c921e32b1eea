"""What is written down of a measurement: one line of JSON, the meeting point of measuring and reporting.

Nothing in this file, or in what it imports, imports torch. All amounts are in base units: bytes and seconds.
A field that is ``None`` was not, or could not be, read by the meter of its case.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actbench.counts import COUNT_LIMIT, NonNegativeInt, PositiveInt, SignedInt
from actbench.defaults import with_dtype, with_optimizer

SCHEMA_VERSION: Final = 1
SchemaVersion = Annotated[int, Field(strict=True, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]  # Literal takes true for 1

Task = Literal[
    "auto",
    "sequence-classification",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
    "image-classification",
    "node-classification",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "next-sentence-prediction",
    "pretraining",
    "masked-image-modeling",
    "semantic-segmentation",
    "depth-estimation",
    "object-detection",
    "audio-classification",
    "ctc",
    "speech-seq2seq",
    "image-text-contrastive",
    "image-text-to-text",
]
Attention = Literal["sdpa", "eager"]
FloatType = Literal["float32", "bfloat16", "float16"]
Optimizer = Literal["adamw", "adam", "sgd", "sgd-momentum"]
MeterName = Literal["simulated", "cpu", "cuda"]
WeightsChoice = Literal["auto", "pretrained", "random"]
FailureReason = Literal[
    "out-of-memory",  # the step did not fit
    "timeout",  # the case took longer than --timeout
    "crash",  # the process of the case died or raised something unforeseen
    "nothing-converted",  # the scheme found nothing to work on
    "unsupported",  # the meter, model and scheme do not go together
    "unavailable",  # the device or a library is missing on this machine
]


class Data(BaseModel):
    """A frozen value that is read from or written to a file; unknown fields are refused.

    NaN and infinity are written as strings and read back as numbers: a null would say that nothing was measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Case(Data):
    """One cell of a comparison, fully resolved: what to build, what to apply and how to measure it.

    A function of the user's own may have ``dtype`` and ``optimizer`` None: those that it brings, or AdamW. A folder or
    a model of the hub may have ``dtype`` None: that of its config. Of others None becomes ``float32`` and ``adamw``.
    """

    model: str = Field(min_length=1)
    task: Task = "auto"
    scheme: str = "exact"
    batch_size: PositiveInt
    sequence_length: PositiveInt | None = None
    image_size: PositiveInt | None = None
    attention: Attention = "sdpa"
    dtype: FloatType | None = None
    autocast: Literal["bfloat16", "float16"] | None = None
    optimizer: Optimizer | None = None
    weights: WeightsChoice = "random"
    trust_remote_code: bool = False
    meter: MeterName = "simulated"
    device_profile: str | None = None
    memory_limit_bytes: PositiveInt | None = None
    find_largest_batch: bool = False
    gradient_quality: bool = True
    seed: Annotated[int, Field(ge=0, lt=2 * COUNT_LIMIT)] = 0
    warmup_steps: NonNegativeInt = 2
    min_steps: PositiveInt = 10
    min_seconds: Annotated[float, Field(ge=0)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, data: Any) -> Any:
        return with_optimizer(with_dtype(data))

    def key(self) -> str:
        """Return the identity of the case: equal cases, and only those, have equal keys."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class Built(Data):
    """What the model, task and sizes of a case came to: what was really built and fed.

    Attributes:
        model_class: Name of the model's class.
        task: Never ``auto``; None where a function of the user's own has none.
        sequence_length: Tokens of a sample, those of the decoder where the encoder reads no text; None without text.
        image_size: Height and width of a sample's image in pixels; None without images.
        audio_shape: Shape of a sample's audio: ``(samples,)`` of a waveform at 16 kHz, or that of its features.
    """

    model_class: str
    task: Task | None = None
    sequence_length: PositiveInt | None = None
    image_size: tuple[PositiveInt, PositiveInt] | None = None
    audio_shape: tuple[PositiveInt, ...] | None = None


class Site(Data):
    """One place of the model that a scheme changed.

    Attributes:
        path: Dotted path of the module in the model; empty for the model itself.
        was: What stood there, such as ``nn.GELU``.
        becomes: What stands there now, such as ``3-bit GELU``.
        bytes_before: Bytes this place keeps for backward in the exact model at the case's batch.
        bytes_after: The same after conversion.
        calls: How often it ran in one step; 0 means that the step never reached it.
    """

    path: str
    was: str
    becomes: str
    bytes_before: NonNegativeInt | None = None
    bytes_after: NonNegativeInt | None = None
    calls: NonNegativeInt | None = None


class Unreached(Data):
    """A place that a reader might expect to be converted and that was not, with the reason."""

    path: str
    kind: str
    reason: str


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


class Failure(Data):
    """Why a case has no measurement. A failed case is a result."""

    kind: Literal["failed"] = "failed"
    reason: FailureReason
    message: str
    peak_bytes: NonNegativeInt | None = None


Outcome = Annotated[Measurement | Failure, Field(discriminator="kind")]


class Machine(Data):
    """Where a case was measured."""

    name: str
    system: str
    processor: str
    cores: PositiveInt
    memory_bytes: PositiveInt
    gpu: str | None = None
    gpu_memory_bytes: PositiveInt | None = None
    driver: str | None = None

    @property
    def identity(self) -> tuple[str, str | None]:
        """What tells it from others: its name, and its GPU, which may be exchanged."""
        return self.name, self.gpu


class Versions(Data):
    """What a case was measured with. ``dirty`` is true when the checkout had uncommitted changes."""

    actbench: str
    python: str
    torch: str
    torchvision: str | None = None
    transformers: str | None = None
    numba: str | None = None
    cuda: str | None = None
    cupy: str | None = None
    commit: str | None = None
    dirty: bool | None = None


class Published(Data):
    """A figure that the authors of a scheme published.

    Attributes:
        quantity: What the figure says: ``peak_saving`` is the share of exact's peak that is saved (0.138 = 13.8 %),
            ``batch_ratio`` the largest batch over exact's, ``activation_ratio`` exact's activation bytes over its own.
        value: The figure.
        setting: Model, batch, hardware.
        source: Where it stands.
    """

    quantity: Literal["peak_saving", "peak_bytes", "batch_ratio", "largest_batch", "activation_ratio", "accuracy"]
    value: float
    setting: str
    source: str


class Record(Data):
    """One line of a results file. ``label`` is what the recipe calls the scheme, where it does."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    recipe: str
    case: Case
    outcome: Outcome
    machine: Machine
    versions: Versions
    command: str
    recorded_at: str
    label: str | None = None
    published: tuple[Published, ...] = ()
