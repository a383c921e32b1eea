"""The record of an experiment: one line of JSON, where measuring and reporting meet.

Nothing in this file, or in what it imports, imports torch. All amounts are in base units: bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator

from actbench.errors import UsageError
from actbench.model.data import Data, OutcomeData, StoredData, shared
from actbench.model.meters import MeterName
from actbench.model.modelspecs import dtype_for, optimizer_for
from actbench.model.provenance import Machine, Published, Versions
from actbench.model.scripts import Script
from actbench.model.settings import (  # cases are of them, and so are most who import cases
    Attention as Attention,
    Cache as Cache,
    FloatName as FloatName,
    FloatType as FloatType,
    HalfType as HalfType,
    Optimizer as Optimizer,
    Task as Task,
    WeightsChoice as WeightsChoice,
    WorkloadSettings as WorkloadSettings,
    whole_name as whole_name,
)
from actbench.units import COUNT_LIMIT, NonNegativeInt, PositiveInt
from actbench.validation import explain

SCHEMA_VERSION: Final = 1
SchemaVersion = Annotated[int, Field(strict=True, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]  # a Literal accepts true for 1

TorchEra = Literal["1.10", "1.13", "2.11", "2.13", "2.14"]
"""The torch that a step is simulated of in place of the installed one: the last before one that needs other memory."""
Phase = Literal["forward", "backward", "optimizer", "prefill", "generation"]
"""Part of a training step, of which ``optimizer`` is the optimizer's step, or of a generation."""
FailureReason = Literal[
    "out-of-memory",  # the step did not fit
    "timeout",  # the case took longer than --timeout
    "crash",  # the process of the case died or raised an unexpected error
    "nothing-converted",  # the scheme found nothing to work on
    "unsupported",  # the meter, model and scheme do not go together
    "unavailable",  # the device or a library is missing on this machine
]


class Case(WorkloadSettings):
    """One cell of a comparison, fully resolved: what to build, what to apply and how to measure it.

    For a function of the user's own, ``dtype`` and ``optimizer`` may be None: the function's own, or AdamW. For a
    folder or a model of the hub, ``dtype`` may be None: the config's. Elsewhere None becomes ``float32`` and ``adamw``.
    With a ``script``, ``model`` is its text, dtype and optimizer are the script's own, and so is the number of rows,
    unless the ``script`` says it.

    A simulated step is that of an older torch where ``torch_era`` says so. Without ``workspaces`` it leaves out what
    CUDA's libraries allocate for themselves.

    With ``generate`` it is no training step: the model reads ``sequence_length`` tokens and writes so many more, with a
    ``cache``.
    """

    model: str = Field(min_length=1)
    scheme: str = "exact"
    batch_size: PositiveInt
    autocast: HalfType | None = None
    optimizer: Optimizer | None = None
    weights: WeightsChoice = "random"
    trust_remote_code: bool = False
    meter: MeterName = "simulated"
    device_profile: str | None = None
    memory_limit_bytes: PositiveInt | None = None
    torch_era: TorchEra | None = None
    workspaces: bool = True
    generate: PositiveInt | None = None
    cache: Cache = "dynamic"
    find_largest_batch: bool = False
    gradient_quality: bool = True
    seed: Annotated[int, Field(ge=0, lt=2 * COUNT_LIMIT)] = 0
    warmup_steps: NonNegativeInt = 2
    min_steps: PositiveInt = 10
    min_seconds: Annotated[float, Field(ge=0)] = 1.0
    script: Script | None = None

    if not TYPE_CHECKING:  # for type checkers the fields are the arguments

        def __init__(self, **given: Any) -> None:
            """Check a case that Python code makes.

            Raises:
                UsageError: A field is missing or unknown, or has a wrong value.
            """
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise UsageError(f"Case: {'; '.join(explain(error, given, {'': Case, 'script': Script}))}") from None

        __init__.__pydantic_base_init__ = True  # else lines of files, too, would be read by way of it, and slowly

    @model_validator(mode="after")  # mode="before" takes a third of the time of reading: it makes a dict of each line
    def _resolved(self) -> Self:
        if self.script is None:
            dtype, optimizer = self.dtype or dtype_for(self.model), self.optimizer or optimizer_for(self.model)
            self.__dict__.update(dtype=dtype, optimizer=optimizer)
        if self.generate is not None and (self.scheme != "exact" or self.packed is not None):
            given = f"scheme {self.scheme}" if self.scheme != "exact" else f"packed {self.packed}"
            raise ValueError(
                f"{given} changes a training step, and generate = {self.generate} asks for none: leave one out"
            )
        if self.generate is None and self.cache != "dynamic":
            raise ValueError(f"cache = {self.cache}: a training step has no cache; say how many tokens to generate")
        return self

    @property
    def rows(self) -> int | None:
        """The batch size, if the case says it; a script without ``--batch-size`` has its own."""
        return self.batch_size if self.script is None else self.script.batch_size

    @property
    def name(self) -> str:
        """Name for messages."""
        return named(self.model, self.scheme, self.rows, self.meter)

    @property
    def shown_model(self) -> str:
        """The model; of a script what sentences call it."""
        return self.model if self.script is None else self.script.shown

    @property
    def _changed(self) -> str:
        """The scheme, with the optimizer if it is not the model's usual one; of a generation the tokens written."""
        if self.generate is not None:
            return f"{self.generate} tokens"
        is_usual = self.script is not None or self.optimizer == optimizer_for(self.model)
        return self.scheme if is_usual else f"{self.scheme}, {self.optimizer}"

    @property
    def title(self) -> str:
        """The name, with the optimizer if it is not the model's usual one, or with the tokens of a generation."""
        return named(self.model, self._changed, self.rows, self.meter)

    @property
    def cells(self) -> dict[str, str]:
        """What distinguishes it from other cases."""
        rows = "" if self.rows is None else str(self.rows)
        return {"model": self.model, "scheme": self._changed, "batch": rows, "meter": self.meter}

    @property
    def pace(self) -> str:
        """The meter."""
        return self.meter

    @property
    def first_state(self) -> str:
        """The step that gives the peak; of models that are measured, their memory, which is read before their time."""
        return "measuring memory" if self.script is None and self.meter != "simulated" else "first step"

    @property
    def is_searched(self) -> bool:
        """Whether a search of its own follows; simulated cases are searched while they are measured."""
        return self.find_largest_batch and self.meter != "simulated"

    def key(self) -> str:
        """Return the identity of the case: keys are equal if and only if the cases are equal."""
        return self._key(
            ("model", "task", "scheme", "batch_size"), later=("script", "torch_era", "workspaces", "generate", "cache")
        )

    def with_batch(self, rows: int) -> Case:
        """Return the case with batches of so many rows."""
        script = None if self.script is None else self.script.model_copy(update={"batch_size": rows})
        return self.model_copy(update={"batch_size": rows, "script": script})


def named(model: str, scheme: str, rows: int | None, meter: str) -> str:
    """Return the name of a case for messages; ``rows`` is None where its batch is unknown."""
    return f"{model}, {scheme}{'' if rows is None else f', batch {rows}'} ({meter})"


_ALIKE = 1.01
"""The most by which the peak of one step exceeds that of another if both are told as one figure."""


def differ(peaks: Sequence[int]) -> bool:
    """Return whether the peaks of steps differ so much that they are told apart."""
    return max(peaks, default=0) > _ALIKE * min(peaks, default=0)


class Built(StoredData):
    """The model, task and sizes that were really built and fed for a case.

    Attributes:
        model_class: Name of the model's class.
        task: Never ``auto``; None for a function of the user's own.
        sequence_length: Tokens of a sample, of the decoder if the encoder reads no text; None without text.
        target_length: Tokens that a decoder writes, where its encoder reads another number of them.
        image_size: Height and width of a sample's image in pixels; None without images.
        audio_shape: Shape of a sample's audio: ``(samples,)`` of a waveform at 16 kHz, or the shape of its features.
        batch_size: Rows of a micro-batch of a script, as they were found: the largest of the step that is measured.
        micro_batches: Micro-batches of a step of a script; None where they were not counted.
        head: Path of the linear layer that makes the logits in a script's model; empty where the model itself names it
            (``get_output_embeddings``), None where no layer stands out.
        refused: Schemes that are worth trying on many scripts, and that refuse the model of this one.
        stopped_after: Steps of a script after which it was ended; None if it ended by itself, and in older records.
        failed: Why a script failed whose run was measured until then; None if it did not, and in older records.
        step_peaks: Peaks of the steps of a script that were compared, in their order; the largest is that of the
            measurement. Empty for a model, and in older records.
        larger_batches: How many times as many bytes as the batches that ran a later batch of a script's data has; None
            where none was found, or looked for.
        waiting_rows: Rows of the batches of a loader that has not run, where they are more than ``batch_size``.
    """

    model_class: str
    task: Task | None = None
    sequence_length: PositiveInt | None = None
    target_length: PositiveInt | None = None
    image_size: tuple[PositiveInt, PositiveInt] | None = None
    audio_shape: tuple[PositiveInt, ...] | None = None
    batch_size: PositiveInt | None = None
    micro_batches: PositiveInt | None = None
    head: str | None = None
    refused: tuple[str, ...] = ()
    stopped_after: PositiveInt | None = None
    failed: str | None = None
    step_peaks: tuple[NonNegativeInt, ...] = ()
    larger_batches: float | None = None
    waiting_rows: PositiveInt | None = None


class Site(StoredData):
    """One place of the model that a scheme changed.

    Attributes:
        path: Dotted path of the module in the model; empty for the model itself.
        was: What was there before, such as ``nn.GELU``.
        becomes: What is there now, such as ``3-bit GELU``.
        bytes_before: Bytes that this site saves for backward in the exact model at the case's batch.
        bytes_after: The same after conversion.
        calls: How often it ran in one step; 0 means that the step never reached it.
        called: Whether the site is a call in the module's code; its bytes then exclude those of the modules inside.
    """

    path: str
    was: str
    becomes: str
    bytes_before: NonNegativeInt | None = None
    bytes_after: NonNegativeInt | None = None
    calls: NonNegativeInt | None = None
    called: bool = False


class Unreached(Data):
    """A place that a reader may expect to be converted, why it is not, and the bytes of weights that stay whole so."""

    path: str
    kind: str
    reason: str
    weights_bytes: NonNegativeInt | None = None


class Failure(OutcomeData):
    """Why a case has no measurement. A failed case is a result.

    ``peak_bytes`` is in older records of cases that were only over their limit. ``phase``: in which memory ran out.
    """

    kind: Literal["failed"] = "failed"
    reason: FailureReason
    message: str
    peak_bytes: NonNegativeInt | None = None
    phase: Phase | None = None

    @property
    def state(self) -> str:
        """The reason."""
        return self.reason

    @property
    def ending(self) -> str:
        """The reason; the message stands below the table."""
        return f"failed, {self.reason}"


CaseT = TypeVar("CaseT", bound=Data)
OutcomeT = TypeVar("OutcomeT")
Migrations = dict[int, Callable[[dict[str, Any]], dict[str, Any]]]


class Record(StoredData, Generic[CaseT, OutcomeT]):
    """One line of a results file of any kind of experiment. ``label`` is the recipe's name for the scheme.

    Attributes:
        files: Digest of each file that the case names, by its path, that of a script with what it may import; None
            where it names none, and in older records.

    Class attributes:
        migrations: For each schema version, a function from a record of that version to one of the next.
    """

    migrations: ClassVar[Migrations]

    schema_version: SchemaVersion = SCHEMA_VERSION
    recipe: str
    case: CaseT
    outcome: OutcomeT
    machine: Annotated[Machine, AfterValidator(shared)]
    versions: Annotated[Versions, AfterValidator(shared)]
    command: Annotated[str, AfterValidator(shared)]
    recorded_at: str
    label: str | None = None
    published: tuple[Published, ...] = ()
    files: dict[str, str] | None = None

    @property
    def awaits_search(self) -> bool:
        """Whether another record of the case is to follow, as of one whose largest batch is yet to be searched."""
        return False
