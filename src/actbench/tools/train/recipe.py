"""Which training runs to compare, as the author wrote it: a TOML file with ``[train]`` and ``[[scheme]]``.

A recipe may have several ``[[train]]``. Seeds are the outermost loop, so the schemes of a seed run together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from actbench.errors import UsageError
from actbench.model.data import Data
from actbench.model.records import Optimizer, WeightsChoice
from actbench.run.recipes.files import TRAININGS, BaseRecipe, RecipeFiles, Tables, check_count
from actbench.run.recipes.sections import Autocast, Axis, GivenSettings, Planned, SchemeRow, Steps, read_by
from actbench.tools.train.records import DeviceName, Schedule, Share, TrainingCase
from actbench.units import Count
from actbench.validation import flag

Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
MOST_SEEDS = 1000

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds: ``3``, ``0,1,2`` or ``0-4``, or these with commas; a UsageError for anything else or repeats."""
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


class TrainSection(GivenSettings):
    """What is trained and how; fields are those of :class:`~actbench.tools.train.records.TrainingCase`.

    Every scheme runs once for each of ``seeds``; ``device`` is ``auto`` for a GPU where there is one.
    """

    model: Annotated[str, Field(min_length=1)]
    data: Annotated[str, Field(min_length=1)]
    batch_size: Count
    epochs: Count | None = None
    steps: Count | None = None
    optimizer: Optimizer
    learning_rate: Positive
    weight_decay: Number | None = None
    momentum: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None
    schedule: Schedule | None = None
    milestones: tuple[Share, ...] | None = None
    gamma: Share | None = None
    warmup_steps: Steps | None = None
    evaluate_every: Count | None = None
    autocast: Autocast | None = None
    weights: WeightsChoice | None = None
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    max_grad_norm: Positive | None = None
    gradient_accumulation: Count | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seeds: Annotated[Axis[Steps], read_by(parse_seeds)] = (0,)

    @model_validator(mode="after")
    def _length_is_given_once(self) -> TrainSection:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give the length of a run either as epochs or as steps")
        return self

    @model_validator(mode="after")
    def _options_are_used(self) -> TrainSection:
        if self.momentum and not self.optimizer.startswith("sgd"):
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


class TrainingRecipe(BaseRecipe):
    """Training runs to compare: one or several ``[train]`` sections."""

    files: ClassVar[RecipeFiles] = TRAININGS
    sections: ClassVar[Mapping[str, type[Data]]] = {"train": TrainSection}

    train: Tables[TrainSection]
    scheme: tuple[SchemeRow, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """The model of each section."""
        return tuple(section.model for section in self.train)

    def _check_repeats(self) -> None:
        for place, row in enumerate(self.scheme):
            if row.meters:
                raise ValueError(f"scheme[{place}].meters: a training run has no meter; leave it out")
        check_count(sum(len(part.seeds) * len(self.rows(part.model)) for part in self.train), "training runs")
        seen: dict[str, str] = {}
        for planned in self.runs("cpu"):
            case = planned.case
            name = "+".join(sorted(case.scheme.split("+")))
            key = case.model_copy(update={"scheme": name}).key()
            if key in seen:
                raise ValueError(
                    f"the same run is given twice: {case.model} on {case.data}, seed {case.seed}, {seen[key]!r} and "
                    f"{case.scheme!r}; each [[train]] and each [[scheme]] must differ from the others"
                )
            seen[key] = case.scheme

    def runs(self, auto: DeviceName) -> tuple[Planned[TrainingCase], ...]:
        """Return every run, the schemes of one seed beside each other; ``auto`` is the device ``auto`` stands for."""
        return tuple(run for section in self.train for run in self._runs_of(section, auto))

    def _runs_of(self, section: TrainSection, auto: DeviceName) -> Iterator[Planned[TrainingCase]]:
        device = auto if section.device == "auto" else section.device
        for seed in section.seeds:
            for row in self.rows(section.model):
                yield Planned(section.case(row.spec, seed, device), row.label, row.published)

    def with_flags(self, flags: Mapping[str, Any], schemes: Sequence[str] = ()) -> TrainingRecipe:
        """Return this recipe with flags in place of what it says, by field of :class:`TrainSection`.

        Raises:
            RecipeError: A value cannot be used; the message names its flag.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        base = self.model_dump(exclude_none=True)
        if "steps" in given:
            for section in base["train"]:
                section.pop("epochs", None)
        base["train"] = [{**section, **given} for section in base["train"]]
        if schemes:
            base["scheme"] = [{"spec": text} for text in schemes]
        return TrainingRecipe.validated(base, "command line", flag)


load = TrainingRecipe.load
names = TrainingRecipe.files.names
