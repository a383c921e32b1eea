"""The sections of a recipe: the models and their training, the measurement, and the compared schemes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, create_model, field_validator

from actbench import plugins
from actbench.errors import SpecError, UsageError
from actbench.model import spec
from actbench.model.data import Data
from actbench.model.declared import device_named
from actbench.model.meters import MeterName
from actbench.model.provenance import Published
from actbench.model.records import Cache, CaseT, Optimizer, TorchEra, WeightsChoice, WorkloadSettings, whole_name
from actbench.units import COUNT_LIMIT, LONGEST_SECONDS, Count, parse_bytes

MOST_BATCH_SIZES = 1000

_OURS = ("simulated", "cpu", "cuda")  # in the order in which messages have them
if TYPE_CHECKING:
    InstalledMeter = str
else:
    InstalledMeter = Literal[(*_OURS, *(name for name in plugins.installed("meters") if name not in _OURS))]
"""The name of a meter that is installed here, which flags and recipes may ask for."""

_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})([+*])(\d{1,18})")


def parse_batch_range(text: str, what: str = "batch size") -> tuple[int, ...]:
    """Read batch sizes: ``8``, ``8,16``, ``8-32+8`` (in steps of 8), ``8-512*2`` (doubling), or these with commas.

    A range holds its last value only when a step lands on it. ``what`` is what messages call them.

    Raises:
        UsageError: The text is none of these, or a size is 0 or is given twice.
    """
    sizes: list[int] = []
    for part in text.split(","):
        sizes.extend(_parse_part(part.strip(), text, f"{what} {text!r}"))
        if len(sizes) > MOST_BATCH_SIZES:
            raise UsageError(f"{what} {text!r} spans more than {MOST_BATCH_SIZES:,} sizes: take larger steps")
    if len(set(sizes)) < len(sizes):
        raise UsageError(f"{what} {text!r} holds the same size twice")
    return tuple(sizes)


def _parse_part(part: str, text: str, whole: str) -> tuple[int, ...]:
    if part.isascii() and part.isdigit() and len(part) < 19 and int(part) > 0:
        return (int(part),)
    if part.isascii() and part.isdigit() and not part.strip("0"):
        raise UsageError(f"{whole}: a size is at least 1")
    match = _RANGE.fullmatch(part)
    if match is None:
        wrong = "" if part == text else f", and not {part!r}"
        raise UsageError(f"{whole}: write a number (8), a list (8,16) or a range (8-32+8, 8-512*2){wrong}")
    first, last, step = int(match[1]), int(match[2]), int(match[4])
    if not 0 < first <= last:
        raise UsageError(f"{whole}: a range begins at 1 or more and ends at its beginning or after it")
    if step < (2 if match[3] == "*" else 1):
        raise UsageError(f"{whole}: a range never ends with the step {match[3]}{step}")
    return tuple(_steps(first, last, match[3], step))


def _steps(first: int, last: int, kind: str, step: int) -> Iterator[int]:
    size = first
    for _ in range(MOST_BATCH_SIZES + 1):
        if size > last:
            return
        yield size
        size = size * step if kind == "*" else size + step


def as_tuple(value: Any) -> Any:
    """Return a list or tuple as a tuple, and any other value as the only one of a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{value!r} is given twice")
        seen.add(value)
    return values


def read_by(parse: Callable[[str], Any]) -> BeforeValidator:
    """Validate a text by a function that may raise a UsageError, and take any other value as it is."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except UsageError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


T = TypeVar("T")
Axis = Annotated[tuple[T, ...], BeforeValidator(as_tuple), Field(min_length=1), AfterValidator(_distinct)]
"""One value or a list of distinct values, read as a tuple."""
BatchSizes = Annotated[Axis[Count], read_by(parse_batch_range)]
"""An axis that can also be written as a range."""
Lengths = Annotated[Axis[Count], read_by(partial(parse_batch_range, what="sequence length"))]


Switch = Annotated[bool, Field(strict=True)]
Steps = Annotated[int, Field(strict=True, ge=0, lt=COUNT_LIMIT)]
Autocast = Annotated[Literal["none", "bfloat16", "float16"], BeforeValidator(whole_name)]


def _settings(kind: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the settings of a workload as fields that may be left out; ``kind`` makes a type of that of one value."""
    hints = get_type_hints(WorkloadSettings, include_extras=True)
    return {name: (kind(hints[name]) | None, None) for name in WorkloadSettings.model_fields}


if TYPE_CHECKING:  # which does not see that these are classes

    class GivenSettings(Data):
        """Each field of :class:`WorkloadSettings`, or None."""

    class SettingsGrid(Data):
        """An axis for each field of :class:`WorkloadSettings`, or None."""

else:
    GivenSettings = create_model("GivenSettings", __base__=Data, **_settings(lambda one: one))
    SettingsGrid = create_model("SettingsGrid", __base__=Data, **_settings(lambda one: Axis[one]))


class WorkloadGrid(SettingsGrid):
    """The models and how they are trained, with a list of values of each field of :class:`WorkloadSettings`.

    ``torch_era`` and ``workspaces`` concern simulated cases. ``meters`` replaces those of ``[measure]``, and
    ``largest_batch_within`` is the memory limit of the case that is searched for its largest batch, where ``[measure]``
    has none.
    """

    model: Axis[Annotated[str, Field(min_length=1)]]
    batch_size: BatchSizes
    sequence_length: Lengths | None = None
    autocast: Axis[Autocast] | None = None
    optimizer: Axis[Optimizer] | None = None
    generate: Axis[Count] | None = None
    cache: Axis[Cache] | None = None
    weights: WeightsChoice | None = None
    trust_remote_code: Switch | None = None
    torch_era: Axis[TorchEra | Literal["none"]] | None = None
    workspaces: Switch | None = None
    meters: Axis[InstalledMeter] | None = None
    largest_batch_within: Annotated[Count | None, read_by(parse_bytes)] = None

    @property
    def points_of_a_model(self) -> int:
        """How many points of the grid each of its models has."""
        return math.prod(len(values) for name, values in self._axes().items() if name != "model")

    def _axes(self) -> dict[str, tuple[Any, ...]]:
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in _OF_NO_CASE}
        given = {name: value for name, value in fields.items() if value is not None}
        axes = {name: value if isinstance(value, tuple) else (value,) for name, value in given.items()}
        return {"model": axes.pop("model"), **axes, "batch_size": axes.pop("batch_size")}

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of a case for each point of the grid, the batch size changing fastest."""
        axes = self._axes()
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            yield {name: None if value == "none" else value for name, value in point.items()}


_OF_NO_CASE = ("meters", "largest_batch_within")
_OF_SIMULATIONS = ("torch_era", "workspaces")


def of_real_device(point: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a point of a grid that do not concern simulated cases alone."""
    return {name: value for name, value in point.items() if name not in _OF_SIMULATIONS}


class Measure(Data):
    """How to measure; steps and seconds of timing do not concern the simulated meter, which has no clock."""

    meters: Axis[InstalledMeter] = ("simulated",)
    device_profile: Annotated[str, Field(min_length=1)] | None = None
    memory_limit: Annotated[Count | None, read_by(parse_bytes)] = None
    largest_batch: Switch = False
    gradient_quality: Switch | None = None
    warmup_steps: Steps | None = None
    min_steps: Count | None = None
    min_seconds: Annotated[float, Field(strict=True, ge=0, le=LONGEST_SECONDS)] | None = None
    seed: Axis[Steps] = (0,)

    def settings(self, meter: MeterName) -> dict[str, Any]:
        """Return the fields of a case that follow from these settings."""
        given: dict[str, Any] = {"memory_limit_bytes": self.memory_limit, "gradient_quality": self.gradient_quality}
        if meter == "simulated":
            given["device_profile"] = self.device_profile and device_named(self.device_profile)
        else:
            given |= {name: getattr(self, name) for name in ("warmup_steps", "min_steps", "min_seconds")}
        return {name: value for name, value in given.items() if value is not None}


class SchemeRow(Data):
    """A scheme, its label, the models and meters it is for (all, unless given), and what its authors published.

    In a cumulative recipe one that stands ``alone`` is added to nothing, and nothing is added to it.
    """

    spec: str
    models: Axis[str] | None = None
    meters: Axis[InstalledMeter] | None = None
    label: str | None = Field(default=None, min_length=1)
    published: tuple[Published, ...] = ()
    alone: Switch = False

    @field_validator("spec")
    @classmethod
    def _parses(cls, text: str) -> str:
        try:
            return "+".join(str(part) for part in spec.parse_spec(text))
        except SpecError as error:
            raise ValueError(str(error)) from None

    @property
    def is_added(self) -> bool:
        """Whether it is one of those that a cumulative recipe adds one after the other."""
        return not self.alone and self.spec != "exact"

    def suits(self, model: str) -> bool:
        """Whether the scheme is to be measured on a model."""
        return self.models is None or model in self.models

    def is_for(self, meters: Iterable[MeterName]) -> bool:
        """Whether the scheme is to be measured on one of these meters."""
        return self.meters is None or not set(self.meters).isdisjoint(meters)

    @property
    def parts(self) -> tuple[str, ...]:
        """The schemes that it composes, sorted."""
        return tuple(sorted(self.spec.split("+")))

    def meets(self, other: SchemeRow) -> bool:
        """Whether both are for one model."""
        return self.models is None or other.models is None or not set(self.models).isdisjoint(other.models)


@dataclass(frozen=True)
class Planned(Generic[CaseT]):
    """A case of any kind with what its recipe says of it."""

    case: CaseT
    label: str | None = None
    published: tuple[Published, ...] = ()
