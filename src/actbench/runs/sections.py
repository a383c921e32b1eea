"""The section of a recipe that says what is trained and how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from actbench.errors import UsageError
from actbench.recipe.axes import Axis, Count
from actbench.recipe.sections import Steps
from actbench.records import Attention, Data, FloatType, Published, Task, WeightsChoice
from actbench.runs.records import DeviceName, OptimizerName, Schedule, Share, TrainingCase

Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
MOST_SEEDS = 1000

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds: ``3``, ``0,1,2`` or ``0-4``, or these with commas.

    Raises:
        UsageError: The text is none of these, or a seed stands twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first >= MOST_SEEDS:
            raise UsageError(f"seeds {text!r}: {part.strip()!r} is neither a seed, such as 3, nor a range, such as 0-4")
        seeds.extend(range(first, last + 1))
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds {text!r} hold the same seed twice")
    return tuple(seeds)


def _as_seeds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_seeds(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _whole_name(value: Any) -> Any:
    return {"bf16": "bfloat16", "fp16": "float16"}.get(value, value) if isinstance(value, str) else value


class TrainSection(Data):
    """What is trained and how; each field is as in :class:`~actbench.runs.records.TrainingCase`.

    ``seeds`` gives one run of every scheme for each; ``device`` is ``auto`` for a GPU where there is one; ``autocast``
    may be written ``bf16`` or ``fp16``.
    """

    model: Annotated[str, Field(min_length=1)]
    data: Annotated[str, Field(min_length=1)]
    batch_size: Count
    epochs: Count | None = None
    steps: Count | None = None
    optimizer: OptimizerName
    learning_rate: Positive
    weight_decay: Number | None = None
    momentum: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None
    schedule: Schedule | None = None
    milestones: tuple[Share, ...] | None = None
    gamma: Share | None = None
    warmup_steps: Steps | None = None
    evaluate_every: Count | None = None
    task: Task | None = None
    sequence_length: Count | None = None
    image_size: Count | None = None
    attention: Attention | None = None
    dtype: FloatType | None = None
    autocast: Annotated[Literal["none", "bfloat16", "float16"], BeforeValidator(_whole_name)] | None = None
    weights: WeightsChoice | None = None
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    max_grad_norm: Positive | None = None
    gradient_accumulation: Count | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seeds: Annotated[Axis[Steps], BeforeValidator(_as_seeds)] = (0,)

    @model_validator(mode="after")
    def _length_is_given_once(self) -> TrainSection:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give the length of a run either as epochs or as steps")
        return self

    @model_validator(mode="after")
    def _options_are_used(self) -> TrainSection:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is an option of sgd; {self.optimizer} has none")
        if (self.gradient_accumulation or 1) > self.batch_size:
            raise ValueError(
                f"gradient_accumulation {self.gradient_accumulation}: a batch of {self.batch_size} has fewer parts"
            )
        for name in ("milestones", "gamma"):
            if getattr(self, name) is not None and self.schedule != "multi_step":
                raise ValueError(f"{name} is an option of the schedule multi_step")
        return self

    def case(self, scheme: str, seed: int, device: DeviceName) -> TrainingCase:
        """Return one run of this section."""
        fields = self.model_dump(exclude={"seeds", "device"}, exclude_none=True)
        fields = {name: None if value == "none" else value for name, value in fields.items()}
        return TrainingCase(**fields, scheme=scheme, seed=seed, device=device)


@dataclass(frozen=True)
class PlannedRun:
    """A run with what its recipe says of it."""

    case: TrainingCase
    label: str | None = None
    published: tuple[Published, ...] = ()
