"""The records of ``actbench fit``, one for each plan that was simulated or measured, and which are worth showing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from actbench.model.contents import Content, content_of
from actbench.model.data import Data
from actbench.model.gradient import GRADIENTS, Gradient
from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure, Migrations, Optimizer, Record
from actbench.report.advice import needed_bytes
from actbench.tools.fit.words import Blocks, is_uniform, sentence, short
from actbench.units import PositiveInt

Trained = Literal["all", "adapters"]
"""The trained parameters: all that the model trains, or other and fewer ones."""


class Training(Data):
    """How training with a plan differs from training with the exact step.

    Attributes:
        trained: Whether it trains the model's own parameters.
        gradient: What the schemes declare about the gradient; ``precision`` is a separate field.
        updates: Whether the optimizer makes the same update from a gradient.
        precision: Whether it computes in the case's own dtypes.
    """

    trained: Trained = "all"
    gradient: Gradient = "exact"
    updates: Literal["same", "other"] = "same"
    precision: Literal["same", "other"] = "same"

    @property
    def is_exact(self) -> bool:
        """Whether training equals the exact step's, to rounding."""
        return self == Training()

    def is_as_near(self, other: Training) -> bool:
        """Whether it trains the same parameters as ``other``, and is nowhere further from the exact step."""
        return self.trained == other.trained and all(
            mine <= theirs for mine, theirs in zip(self._distance, other._distance, strict=True)
        )

    @property
    def _distance(self) -> tuple[int, bool, bool]:
        return GRADIENTS.index(self.gradient), self.updates == "other", self.precision == "other"


class Asked(Data):
    """The request of a fit, beside the case of the exact step.

    Attributes:
        max_slowdown: Largest allowed ratio of a plan's estimated time to the exact step's.
        exact: Whether training must equal the exact step's.
        optimizer: The optimizer of the exact step.
        others: Optimizers that may replace it, with other updates.
        scheme: What every plan has, and the exact step, too.
        limit_bytes: Memory that a step may use; None in older records, whose cases have it.
        max_gradient_error: Largest allowed relative L2 error of the gradient; None is without a limit.
    """

    max_slowdown: Annotated[float, Field(ge=1)] = 2.0
    exact: bool = False
    optimizer: Optimizer | None = None
    others: tuple[Optimizer, ...] = ()
    scheme: str = "exact"
    limit_bytes: PositiveInt | None = None
    max_gradient_error: Annotated[float, Field(ge=0)] | None = None


class FitRecord(Record[Case, Annotated[Measurement | Failure, Field(discriminator="kind")]]):
    """One line of a file of fits.

    Attributes:
        of_copy: Whether the model is a copy with fewer blocks, or a smaller one on which errors of the gradient are
            measured: it only says what is worth simulating.
        gradient_error: Relative L2 error of the gradient, as the errors of its parts add up; None without a limit.
    """

    migrations: ClassVar[Migrations] = {}

    asked: Asked = Asked()
    training: Training = Training()
    of_copy: bool = False
    gradient_error: float | None = None


def step_seconds_of(measured: Measurement) -> float | None:
    """Return the estimated seconds of a step; None if the simulated device has no known rates."""
    return None if measured.estimated is None else measured.estimated.step_seconds


MARGIN: Final = 1.1
"""Times the root of the sum of squares that the error of a plan's gradient may be: they add up to within 10 %."""

_ALIKE = 0.02  # share of a step's time; the errors of estimates are larger


@dataclass(frozen=True)
class Tried:
    """A simulated plan, beside the exact step.

    Attributes:
        exact_seconds: Estimated time of the exact step.
        blocks: The blocks of the model.
    """

    record: FitRecord
    measured: Measurement
    seconds: float
    exact_seconds: float
    blocks: Blocks = field(default_factory=Blocks)

    @property
    def training(self) -> Training:
        """How its training differs from the exact step's."""
        return self.record.training

    @property
    def slowdown(self) -> float:
        """Its time over the exact step's."""
        return self.seconds / self.exact_seconds

    @property
    def is_uniform(self) -> bool:
        """Whether it does the same with all blocks."""
        return is_uniform(self.record.case.scheme, self.blocks)

    @property
    def name(self) -> str:
        """The plan in short, without what every plan has: ``checkpoint 0-10, msln 11-31, chunked_loss:8``."""
        return self._with_optimizer(short(self.record.case.scheme, self.blocks, self.record.asked.scheme))

    @property
    def words(self) -> str:
        """The plan in words."""
        return self._with_optimizer(sentence(self.record.case.scheme, self.blocks, self.record.asked.scheme))

    def _with_optimizer(self, text: str) -> str:
        """Add the optimizer, if it is another than the exact step's."""
        case, asked = self.record.case, self.record.asked
        if case.optimizer is None or case.optimizer == asked.optimizer:
            return text
        return case.optimizer if case.scheme == asked.scheme else f"{text}, {case.optimizer}"

    @property
    def need_bytes(self) -> int:
        """Bytes of the device that it needs, with those that the allocator loses between blocks."""
        return needed_bytes(self.measured)


@dataclass(frozen=True)
class Fitted:
    """All plans that were simulated for one exact step, the fastest first; ``exact`` is one of them.

    Attributes:
        on_device: Records measured on a device, with failures.
    """

    exact: Tried
    tried: tuple[Tried, ...]
    on_device: tuple[FitRecord, ...] = ()

    @property
    def case(self) -> Case:
        """The case of the exact step."""
        return self.exact.record.case

    @property
    def max_slowdown(self) -> float:
        """The largest slowdown of the last request."""
        return self.exact.record.asked.max_slowdown

    @property
    def limit_bytes(self) -> int:
        """Memory that a step may use."""
        return self.exact.record.asked.limit_bytes or self.exact.measured.memory_limit_bytes or 0

    def fits(self, tried: Tried) -> bool:
        """Whether a plan needs no more than the limit."""
        return tried.need_bytes <= self.limit_bytes

    def fitting(self, *, adapters: bool = False) -> list[Tried]:
        """Return the plans that fit and are fast enough, the fastest first."""
        return [each for each in self._alike(adapters) if self.fits(each) and each.slowdown <= self.max_slowdown]

    def nearest(self, *, adapters: bool = False) -> list[Tried]:
        """Return three plans to show where none fits and is fast enough.

        These are the fastest of those that fit, or else those that need least.
        """
        alike = self._alike(adapters)
        fitting = [each for each in alike if self.fits(each)]
        return (fitting or sorted(alike, key=lambda each: each.need_bytes))[:3]

    def _alike(self, adapters: bool) -> list[Tried]:
        if adapters and self.exact.training.trained == "adapters":
            return []  # all plans train them
        trained = "adapters" if adapters else self.exact.training.trained
        return [each for each in self.tried if each.training.trained == trained]

    def shortlist(self, *, adapters: bool = False) -> list[Tried]:
        """Return the rows of a shortlist: the fastest plan that fits for each way of training.

        A plan that trains further from the exact step is left out unless it is faster than estimates may be wrong.
        """
        kept: list[Tried] = []
        fitting = self.fitting(adapters=adapters)
        nearer = {
            id(one): sum(two.training != one.training and two.training.is_as_near(one.training) for two in fitting)
            for one in fitting
        }
        for each in sorted(fitting, key=lambda each: (nearer[id(each)], each.seconds)):
            if not any(other.training.is_as_near(each.training) and _is_as_fast(other, each) for other in kept):
                kept.append(each)
        return [each for each in fitting if each in kept]

    def uniform(self, *, exact: bool) -> Tried | None:
        """Return the fastest plan that fits and does the same with all blocks, of exact or of any gradients."""
        return next((each for each in self._comparable(exact=exact) if each.is_uniform and self.fits(each)), None)

    def frontier(self, *, exact: bool) -> list[Tried]:
        """Return the plans, of exact or of any gradients, that no other undercuts in both bytes and time."""
        front: list[Tried] = []
        for each in self._comparable(exact=exact):
            if not front or each.need_bytes < front[-1].need_bytes:
                front.append(each)
        return front

    def _comparable(self, *, exact: bool) -> list[Tried]:
        """Return the plans with the exact step's parameters, updates and precision, the fastest first."""
        furthest = self.exact.training.model_copy(update={} if exact else {"gradient": GRADIENTS[-1]})
        return [each for each in self.tried if each.training.is_as_near(furthest)]


def _is_as_fast(nearer: Tried, other: Tried) -> bool:
    slack = 0.0 if nearer.training == other.training else _ALIKE
    return nearer.seconds <= (1 + slack) * other.seconds


def fitted(records: Iterable[FitRecord]) -> list[Fitted]:
    """Return the simulated plans of each exact step in the records."""
    groups: dict[tuple[Case, Content], list[FitRecord]] = {}
    exact: dict[tuple[Case, Content], FitRecord] = {}
    for record in (record for record in records if not record.of_copy):
        asked = record.asked
        limit = asked.limit_bytes or record.case.memory_limit_bytes
        of_exact = {"scheme": asked.scheme, "optimizer": asked.optimizer, "memory_limit_bytes": limit}
        what = simulated(record.case).model_copy(update=of_exact), content_of(record)
        groups.setdefault(what, []).append(record)
        if record.case == what[0]:
            exact[what] = record
    return [found for what, group in groups.items() if what in exact and (found := _fitted(exact[what], group))]


def _fitted(exact: FitRecord, records: Sequence[FitRecord]) -> Fitted | None:
    seconds = _seconds(exact)
    if seconds is None:
        return None
    on_device = tuple(record for record in records if record.case.meter != "simulated")
    read = exact.outcome.blocks if isinstance(exact.outcome, Measurement) else None
    blocks = Blocks(tuple(block.path for block in read.blocks) if read else ())
    least: dict[Case, Tried] = {}  # a plan that was simulated for several budgets needs least with the smallest
    for record in (record for record in records if _is_right(record, exact)):
        if isinstance(record.outcome, Measurement) and (time := _seconds(record)) is not None:
            tried, plan = Tried(record, record.outcome, time, seconds, blocks), _without_limit(record.case)
            if plan not in least or tried.need_bytes < least[plan].need_bytes:
                least[plan] = tried
    in_order = tuple(sorted(least.values(), key=lambda each: (each.seconds, each.need_bytes)))
    return Fitted(least[_without_limit(exact.case)], in_order, on_device)


def _is_right(record: FitRecord, exact: FitRecord) -> bool:
    """Whether the error of a gradient is within the limit, with a margin."""
    most, error = exact.asked.max_gradient_error, record.gradient_error
    return most is None or record.case == exact.case or (error is not None and MARGIN * error <= most)


def simulated(case: Case) -> Case:
    """Return the simulated case of a measured one."""
    return case.model_copy(update={"meter": "simulated"})


def _without_limit(case: Case) -> Case:
    return case.model_copy(update={"memory_limit_bytes": None})


def _seconds(record: FitRecord) -> float | None:
    return step_seconds_of(record.outcome) if isinstance(record.outcome, Measurement) else None
