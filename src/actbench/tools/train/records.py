"""The record of a training run: one line of JSON. Amounts are in base units: bytes and seconds."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from actbench.model.data import Data, OutcomeData
from actbench.model.modelspecs import dtype_for
from actbench.model.records import (
    Built,
    Failure,
    HalfType,
    Migrations,
    Optimizer,
    Record,
    WeightsChoice,
    WorkloadSettings,
)
from actbench.units import COUNT_LIMIT, NonNegativeInt, PositiveInt, SignedInt

Schedule = Literal["constant", "cosine", "multi_step"]
DeviceName = Literal["cpu", "cuda"]
Metric = Literal["accuracy", "f1", "correlation", "loss"]
Strategy = Literal["single", "ddp", "fsdp2"]
Share = Annotated[float, Field(gt=0, lt=1)]

# Fields newer than the oldest files: at their defaults they do not change the key of a case.
_LATER = ("tokenizer", "max_grad_norm", "gradient_accumulation", "processes", "strategy")


class TrainingCase(WorkloadSettings):
    """One training run, fully resolved: the model, the data, the settings, the scheme and the seed.

    Attributes:
        epochs: Passes over the training set; None if ``steps`` gives the length of the run.
        learning_rate: The largest rate of the schedule.
        schedule: How the learning rate falls: not at all, by half a cosine to zero, or by ``gamma`` at each milestone.
        milestones: Shares of the run.
        warmup_steps: Steps in which the learning rate rises from zero.
        evaluate_every: Steps between evaluations; None for one per epoch, and 20 at most. One more ends the run.
        dtype: Dtype of weights and pictures; None for the model's own dtypes, if it brings some.
        tokenizer: Folder or name on the hub of a tokenizer for written sentences; None for the model's own.
        max_grad_norm: Norm to which the gradient of all parameters together is clipped.
        gradient_accumulation: Parts of a batch whose gradients are added up before a step.
        processes: How many processes train together; each has its share of every batch.
        seed: Seed of weights, order of the data, dropout and sketches.
    """

    model: str = Field(min_length=1)
    data: str = Field(min_length=1)
    scheme: str = "exact"
    device: DeviceName = "cpu"
    batch_size: PositiveInt
    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    optimizer: Optimizer = "adamw"
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    schedule: Schedule = "constant"
    milestones: tuple[Share, ...] = (0.5, 0.75)
    gamma: Share = 0.1
    warmup_steps: NonNegativeInt = 0
    evaluate_every: PositiveInt | None = None
    autocast: HalfType | None = None
    weights: WeightsChoice = "random"
    seed: Annotated[int, Field(ge=0, lt=2 * COUNT_LIMIT)] = 0
    tokenizer: str | None = None
    max_grad_norm: PositiveFloat | None = None
    gradient_accumulation: PositiveInt = 1
    processes: PositiveInt = 1
    strategy: Strategy = "single"

    @model_validator(mode="after")
    def _resolved(self) -> Self:
        if self.packed is not None:
            raise ValueError("packed: rows of several sequences are measured, not trained; leave it out")
        self.__dict__["dtype"] = self.dtype or dtype_for(self.model)
        return self

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.model} on {self.data}, {self.scheme}, seed {self.seed}"

    @property
    def cells(self) -> dict[str, str]:
        """What distinguishes it from other runs."""
        return {"model": self.model, "scheme": self.scheme, "batch": str(self.batch_size), "meter": self.device}

    def key(self) -> str:
        """Return the identity of the run: keys are equal if and only if the cases are equal."""
        own = [name for name in type(self).model_fields if name not in WorkloadSettings.model_fields]
        return self._key(own[: own.index("evaluate_every") + 1], later=_LATER)


class Evaluation(Data):
    """How good the model was on the whole validation set after so many steps.

    Attributes:
        accuracy: A share of 1; None if labels are no classes.
        f1: F1 of class 1, if it is the metric.
        correlation: Mean of Pearson's and Spearman's with the labels, if it is the metric.
    """

    step: NonNegativeInt
    loss: float
    accuracy: float | None = None
    f1: float | None = None
    correlation: float | None = None


class Trained(OutcomeData):
    """The result of a run that reached its end, or whose loss was not finite.

    Attributes:
        steps: Number of steps of the whole run.
        losses: Training loss of each step, over all processes.
        step_seconds: Wall time of each training step, with reading its loss, without evaluations.
        evaluations: In the order of their steps; the last is that of the finished model.
        diverged_at: The step, from 1, whose loss was not finite.
        weights_bytes: Parameters and buffers of the first process; likewise ``optimizer_bytes``.
        activation_bytes: Bytes live after forward minus before, in one more step after the last evaluation; with
            accumulated gradients, for one part of its batch. The largest of several processes.
        peak_bytes: Peak allocated in that step, everything included; the largest of several processes.
        rank_activation_bytes: Activation bytes by rank; empty for one process. Likewise ``rank_peak_bytes``.
        sites: How many places of the model the scheme changed.
        built: What was trained; None in older records, and if a function of the user's own does not say.
        resumed_at: Steps after which a later process continued from a checkpoint.
    """

    kind: Literal["trained"] = "trained"
    metric: Metric
    steps: PositiveInt
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    evaluations: tuple[Evaluation, ...] = Field(min_length=1)
    diverged_at: PositiveInt | None = None
    weights_bytes: NonNegativeInt
    optimizer_bytes: NonNegativeInt | None = None
    activation_bytes: SignedInt
    peak_bytes: NonNegativeInt
    rank_activation_bytes: tuple[SignedInt, ...] = ()
    rank_peak_bytes: tuple[NonNegativeInt, ...] = ()
    sites: NonNegativeInt = 0
    resumed_at: tuple[PositiveInt, ...] = ()
    weights_origin: str = "random"
    built: Built | None = None
    warnings: tuple[str, ...] = ()

    @property
    def final(self) -> Evaluation:
        """The evaluation of the finished model."""
        return self.evaluations[-1]

    @property
    def score(self) -> float:
        """The metric of the finished model."""
        return float(getattr(self.final, self.metric))

    @property
    def ending(self) -> str:
        """The score and the loss of the finished model, and where the run diverged."""
        accuracy = self.final.accuracy
        score = f"correlation {self.score:.3f}" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"
        diverged = "" if self.diverged_at is None else f", diverged at step {self.diverged_at}"
        return f"{score}, loss {self.final.loss:.4g}{diverged}"


class TrainingRun(Record[TrainingCase, Annotated[Trained | Failure, Field(discriminator="kind")]]):
    """One line of a file of training runs."""

    migrations: ClassVar[Migrations] = {}
