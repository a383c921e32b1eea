"""The sections of a recipe: what is trained, how it is measured, and which schemes are compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from actbench import spec
from actbench.counts import COUNT_LIMIT, LONGEST_SECONDS
from actbench.errors import SpecError, UsageError
from actbench.recipe.axes import Axis, BatchSizes, Count
from actbench.records import Attention, Case, Data, FloatType, MeterName, Optimizer, Published, Task, WeightsChoice
from actbench.units import parse_bytes

Switch = Annotated[bool, Field(strict=True)]
Steps = Annotated[int, Field(strict=True, ge=0, lt=COUNT_LIMIT)]


def _as_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except UsageError as error:
        raise ValueError(str(error)) from None


class WorkloadGrid(Data):
    """The models and how they are trained; what is left out is as :class:`~actbench.records.Case` has it.

    ``meters`` stands for this workload in place of those of ``[measure]``.
    """

    model: Axis[Annotated[str, Field(min_length=1)]]
    batch_size: BatchSizes
    task: Task | None = None
    sequence_length: Axis[Count] | None = None
    image_size: Axis[Count] | None = None
    attention: Axis[Attention] | None = None
    dtype: Axis[FloatType] | None = None
    autocast: Axis[Literal["none", "bfloat16", "float16"]] | None = None
    optimizer: Axis[Optimizer] | None = None
    weights: WeightsChoice | None = None
    trust_remote_code: Switch | None = None
    meters: Axis[MeterName] | None = None

    @property
    def points_of_a_model(self) -> int:
        """How many points of the grid each of its models has."""
        return math.prod(len(values) for name, values in self._axes().items() if name != "model")

    def _axes(self) -> dict[str, tuple[Any, ...]]:
        fields = {name: getattr(self, name) for name in type(self).model_fields if name != "meters"}
        given = {name: value for name, value in fields.items() if value is not None}
        axes = {name: value if isinstance(value, tuple) else (value,) for name, value in given.items()}
        axes["batch_size"] = axes.pop("batch_size")
        return axes

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of a case for each point of the grid, the batch size changing fastest."""
        axes = self._axes()
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            yield {name: None if value == "none" else value for name, value in point.items()}


class Measure(Data):
    """How to measure. Steps and seconds of timing do not concern the simulated meter, which has no clock."""

    meters: Axis[MeterName] = ("simulated",)
    device_profile: Annotated[str, Field(min_length=1)] | None = None
    memory_limit: Annotated[Count | None, BeforeValidator(_as_bytes)] = None
    largest_batch: Switch = False
    gradient_quality: Switch | None = None
    warmup_steps: Steps | None = None
    min_steps: Count | None = None
    min_seconds: Annotated[float, Field(strict=True, ge=0, le=LONGEST_SECONDS)] | None = None
    seed: Axis[Steps] = (0,)

    def settings(self, meter: MeterName) -> dict[str, Any]:
        """Return the fields of a case that follow from these settings, those left out not among them."""
        given: dict[str, Any] = {
            "memory_limit_bytes": self.memory_limit,
            "gradient_quality": self.gradient_quality,
        }
        if meter == "simulated":
            given["device_profile"] = self.device_profile
        else:
            given |= {name: getattr(self, name) for name in ("warmup_steps", "min_steps", "min_seconds")}
        return {name: value for name, value in given.items() if value is not None}


class SchemeRow(Data):
    """A scheme, how tables call it, the models it is for (all, unless given), and what its authors published."""

    spec: str
    models: Axis[str] | None = None
    label: str | None = Field(default=None, min_length=1)
    published: tuple[Published, ...] = ()

    @field_validator("spec")
    @classmethod
    def _parses(cls, text: str) -> str:
        try:
            return "+".join(str(part) for part in spec.parse(text))
        except SpecError as error:
            raise ValueError(str(error)) from None

    def suits(self, model: str) -> bool:
        """Whether the scheme is to be measured on a model."""
        return self.models is None or model in self.models

    @property
    def parts(self) -> tuple[str, ...]:
        """The schemes that it composes, in an order that does not depend on how they are written."""
        return tuple(sorted(self.spec.split("+")))

    def meets(self, other: SchemeRow) -> bool:
        """Whether both are for one model."""
        return self.models is None or other.models is None or not set(self.models).isdisjoint(other.models)


@dataclass(frozen=True)
class PlannedCase:
    """A case with what its recipe says of it."""

    case: Case
    label: str | None = None
    published: tuple[Published, ...] = ()
