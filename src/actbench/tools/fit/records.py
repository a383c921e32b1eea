"""The records of ``actbench fit``, one for each stack of schemes that was tried, and which are worth showing."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from actbench.model.contents import Content, content_of
from actbench.model.data import Data
from actbench.model.gradient import GRADIENTS, Gradient
from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure, Migrations, Optimizer, Record
from actbench.report.advice import needed_bytes

Trained = Literal["all", "adapters"]
"""The trained parameters: all that the model trains, or other and fewer ones."""


class Training(Data):
    """How training with a stack of schemes differs from training with the exact step.

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
        max_slowdown: Largest allowed ratio of a stack's estimated time to the exact step's.
        exact: Whether training must equal the exact step's.
        optimizer: The optimizer of the exact step.
        others: Optimizers that may replace it, with other updates.
    """

    max_slowdown: Annotated[float, Field(ge=1)] = 2.0
    exact: bool = False
    optimizer: Optimizer | None = None
    others: tuple[Optimizer, ...] = ()


class FitRecord(Record[Case, Annotated[Measurement | Failure, Field(discriminator="kind")]]):
    """One line of a file of fits.

    Attributes:
        of_copy: Whether the model is a copy with fewer blocks, which only says what is worth simulating.
    """

    migrations: ClassVar[Migrations] = {}

    asked: Asked = Asked()
    training: Training = Training()
    of_copy: bool = False


def step_seconds_of(measured: Measurement) -> float | None:
    """Return the estimated seconds of a step; None if the simulated device has no known rates."""
    return None if measured.estimated is None else measured.estimated.step_seconds


MOST_ROWS = 10
_ALIKE = 0.02  # share of a step's time; the errors of estimates are larger


@dataclass(frozen=True)
class Tried:
    """A simulated stack, beside the exact step.

    Attributes:
        exact_seconds: Estimated time of the exact step.
        on_frontier: Whether it fits and is fast enough, and no tried stack needs less and is as fast.
    """

    record: FitRecord
    measured: Measurement
    seconds: float
    exact_seconds: float
    on_frontier: bool = False

    @property
    def training(self) -> Training:
        """How its training differs from the exact step's."""
        return self.record.training

    @property
    def slowdown(self) -> float:
        """Its time over the exact step's."""
        return self.seconds / self.exact_seconds

    def outdoes(self, other: Tried) -> bool:
        """Whether it is as fast as ``other``, as far as estimates tell, and nearer to the exact step's training.

        Of two stacks that train alike, a part of the other that it does without is one that saves neither time nor
        memory.
        """
        if self.seconds > (1 + _ALIKE) * other.seconds or not self.training.is_as_near(other.training):
            return False
        return self.training != other.training or self._does_without(other)

    def _does_without(self, other: Tried) -> bool:
        """Whether it has a part less than ``other``, and needs no more."""
        is_other = self.record.case.optimizer != other.record.case.optimizer
        return not is_other and self.need_bytes <= (1 + _ALIKE) * other.need_bytes and self.parts < other.parts

    @property
    def parts(self) -> frozenset[str]:
        """The schemes that it is composed of; none for the exact step."""
        return frozenset(self.record.case.scheme.split("+")) - {"exact"}

    @property
    def told(self) -> Hashable:
        """What a reader sees of it but for the values of its schemes."""
        names = frozenset(part.partition(",")[0].partition(":")[0] for part in self.parts)
        measured = self.measured
        return names, self.record.case.optimizer, self.training, self.seconds, self.need_bytes, measured.peak_bytes

    @property
    def need_bytes(self) -> int:
        """Bytes of the device that it needs, with those that the allocator loses between blocks."""
        return needed_bytes(self.measured)


@dataclass(frozen=True)
class Fitted:
    """All stacks that were tried for one exact step, the fastest first; ``exact`` is one of them.

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

    def fitting(self, *, adapters: bool = False) -> list[Tried]:
        """Return the stacks that fit and are fast enough, the fastest first."""
        alike = self._alike(adapters=adapters)
        return [each for each in alike if each.measured.fits and each.slowdown <= self.max_slowdown]

    def nearest(self, *, adapters: bool = False) -> list[Tried]:
        """Return three stacks to show where none fits and is fast enough.

        These are the fastest of those that fit, or else those that need least.
        """
        alike = _told_once(self._alike(adapters=adapters))
        fitting = [each for each in alike if each.measured.fits]
        return (fitting or sorted(alike, key=lambda each: each.need_bytes))[:3]

    def _alike(self, *, adapters: bool) -> list[Tried]:
        trained = "adapters" if adapters else "all"
        return [each for each in self.tried if each.training.trained == trained]

    def shortlist(self, *, adapters: bool = False) -> list[Tried]:
        """Return the rows of a shortlist: the fastest of each way of training, then the frontier and other stacks.

        All of them fit and are fast enough; the list is empty if none is. A stack is left out if another one of the
        list is as fast, within the error of estimates, and nearer to the exact step's training, or does the same
        without one of its parts. Stacks that differ in values of a scheme only, and in no byte and no second, are one
        row.
        """
        fitting = _not_outdone(_told_once(self.fitting(adapters=adapters)))
        first = [
            each
            for place, each in enumerate(fitting)
            if not any(earlier.training.is_as_near(each.training) for earlier in fitting[:place])
        ]
        others = [each for each in fitting if each not in first]
        others.sort(key=lambda each: not each.on_frontier)
        chosen = [*first, *others][:MOST_ROWS]
        return [each for each in fitting if each in chosen]


def _told_once(stacks: Iterable[Tried]) -> list[Tried]:
    """Return the first of the stacks that look the same, in their order."""
    found: dict[Hashable, Tried] = {}
    for stack in stacks:
        found.setdefault(stack.told, stack)
    return list(found.values())


def _not_outdone(stacks: Sequence[Tried]) -> list[Tried]:
    """Return the stacks that no returned one outdoes, in their order.

    Who may outdo a stack is asked about before it: whatever trains nearer to the exact step, or has fewer parts.
    """

    def place(stack: Tried) -> tuple[int, int]:
        nearer = sum(other.training.is_as_near(stack.training) for other in stacks)
        return nearer, len(stack.parts)

    kept: list[Tried] = []
    for stack in sorted(stacks, key=place):
        if not any(other.outdoes(stack) for other in kept):
            kept.append(stack)
    return [stack for stack in stacks if stack in kept]


def fitted(records: Iterable[FitRecord]) -> list[Fitted]:
    """Return the tried stacks of each exact step in the records."""
    groups: dict[tuple[Case, Content], list[FitRecord]] = {}
    exact: dict[tuple[Case, Content], FitRecord] = {}
    for record in (record for record in records if not record.of_copy):
        case = simulated(record.case).model_copy(update={"scheme": "exact", "optimizer": record.asked.optimizer})
        what = case, content_of(record)
        groups.setdefault(what, []).append(record)
        if record.case == case:
            exact[what] = record
    return [found for what, group in groups.items() if what in exact and (found := _fitted(exact[what], group))]


def _fitted(exact: FitRecord, records: Sequence[FitRecord]) -> Fitted | None:
    seconds = _seconds(exact)
    if seconds is None:
        return None
    on_device = tuple(record for record in records if record.case.meter != "simulated")
    found = [
        Tried(record, record.outcome, time, seconds)
        for record in records
        if isinstance(record.outcome, Measurement) and (time := _seconds(record)) is not None
    ]
    in_order = sorted(found, key=lambda each: (each.seconds, each.need_bytes))
    tried = _with_frontier(in_order, exact.asked.max_slowdown)
    return Fitted(next(each for each in tried if each.record is exact), tuple(tried), on_device)


def simulated(case: Case) -> Case:
    """Return the simulated case of a measured one."""
    return case.model_copy(update={"meter": "simulated"})


def _seconds(record: FitRecord) -> float | None:
    return step_seconds_of(record.outcome) if isinstance(record.outcome, Measurement) else None


def _with_frontier(tried: Sequence[Tried], max_slowdown: float) -> list[Tried]:
    marked, least = [], float("inf")
    for each in tried:
        is_on = each.measured.fits and each.slowdown <= max_slowdown and each.need_bytes < least
        least = min(least, each.need_bytes)
        marked.append(Tried(each.record, each.measured, each.seconds, each.exact_seconds, is_on))
    return marked
