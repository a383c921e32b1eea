"""The records of ``actbench fit``, one for each plan that was simulated or measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, TypeGuard, get_args

from pydantic import Field

from actbench.model.data import Data
from actbench.model.gradient import GRADIENTS, Gradient
from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure, Migrations, Optimizer, Record
from actbench.report.advice import needed_bytes
from actbench.tools.fit.describe import is_uniform, sentence, short
from actbench.units import PositiveInt, format_bytes

if TYPE_CHECKING:
    from torch.nn import Module

    from actbench.scheme.setup import TrainingSetup

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

    @property
    def has_exact_gradient(self) -> bool:
        """Whether the gradient equals the exact step's, to rounding of the case's own types."""
        return self.gradient == "exact" and self.precision == "same"

    def is_as_near(self, other: Training) -> bool:
        """Whether it trains the same parameters as ``other``, and is nowhere further from the exact step."""
        return (
            self.trained == other.trained
            and GRADIENTS.index(self.gradient) <= GRADIENTS.index(other.gradient)
            and self.updates in ("same", other.updates)
            and self.precision in ("same", other.precision)
        )


EXACT: Final = Training()
ANY: Final = Training(gradient=GRADIENTS[-1])
LEVELS: Final = (
    EXACT,
    *(
        Training(trained=trained, gradient=gradient, updates=others, precision=others)
        for trained in get_args(Trained)
        for others in ("same", "other")
        for gradient in GRADIENTS
        if (trained, gradient, others) != ("all", "exact", "same")
    ),
)
"""How far training may differ from the exact step's: the furthest of each level, the nearest first."""


class Asked(Data):
    """The request of a fit, apart from the case of the exact step.

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

    @property
    def exact_step(self) -> tuple[str, Optimizer | None, int | None]:
        """The fields that distinguish exact steps: plans of equal ones share a simulation."""
        return self.scheme, self.optimizer, self.limit_bytes


class Request(Data):
    """A request that a simulation served, and what the plan is in comparison with that request's exact step."""

    asked: Asked = Asked()
    training: Training = Training()
    gradient_error: float | None = None


class FitRecord(Record[Case, Annotated[Measurement | Failure, Field(discriminator="kind")]]):
    """One line of a file of fits.

    Attributes:
        of_copy: Whether the model is a copy with fewer blocks, or a smaller one on which errors of the gradient are
            measured: it only says what is worth simulating.
        gradient_error: Relative L2 error of the gradient, as the errors of its parts add up; None without a limit.
        joined: Whether the step was joined from traces of other steps, and not simulated.
        earlier: Requests that the same simulation served before, the first one first.
    """

    migrations: ClassVar[Migrations] = {}

    asked: Asked = Asked()
    training: Training = Training()
    of_copy: bool = False
    gradient_error: float | None = None
    joined: bool = False
    earlier: tuple[Request, ...] = ()

    def after(self, other: FitRecord | None) -> FitRecord:
        """Return this record with the requests that an earlier one of the same case served.

        A request with the same exact step is answered anew; a record of a copy served none.
        """
        if other is None or other.of_copy:
            return self
        last = Request(asked=other.asked, training=other.training, gradient_error=other.gradient_error)
        kept = [each for each in (*other.earlier, last) if each.asked.exact_step != self.asked.exact_step]
        return self.model_copy(update={"earlier": tuple(kept)})

    def of_requests(self) -> Iterator[FitRecord]:
        """Yield a record for each request that this one served, the last one last."""
        for request in self.earlier:
            yield self.model_copy(update={**dict(request), "earlier": ()})
        yield self.model_copy(update={"earlier": ()})


def is_crash(outcome: Measurement | Failure) -> TypeGuard[Failure]:
    """Whether a simulation crashed: its process died, or raised an unexpected error."""
    return isinstance(outcome, Failure) and outcome.reason == "crash"


def step_seconds_of(outcome: Measurement | Failure | None) -> float | None:
    """Return the estimated seconds of a step; None if it failed, or the simulated device has no known rates."""
    return outcome.estimated.step_seconds if isinstance(outcome, Measurement) and outcome.estimated else None


def to_nine_digits(seconds: float) -> float:
    """Round seconds so that the same times, added up in another order, are the same."""
    return float(f"{seconds:.9g}")


MARGIN: Final = 1.1
"""The error of a plan's gradient may be this many times the root of the sum of squares, which is right to 10 %."""


@dataclass(frozen=True, eq=False, repr=False)
class PlannedStep:
    """A plan that was simulated, or joined from simulations, compared with the exact step.

    Attributes:
        record: The record of the plan.
        measurement: All that the simulation found.
        seconds: Estimated time of a step.
        exact_seconds: Estimated time of the exact step.
        blocks: Paths of the model's blocks, in the order of the forward pass; none are known of older records.
    """

    record: FitRecord
    measurement: Measurement
    seconds: float
    exact_seconds: float
    blocks: tuple[str, ...] = ()

    @property
    def spec(self) -> str:
        """The specification of its schemes, for commands and :func:`actbench.apply`; ``exact`` if there are none."""
        return self.record.case.scheme

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that it was simulated with; None is the model's own."""
        return self.record.case.optimizer

    @property
    def need_bytes(self) -> int:
        """Bytes of the device that it needs, with those that the allocator loses between blocks."""
        return needed_bytes(self.measurement)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are allocated at once."""
        return self.measurement.peak_bytes

    @property
    def slowdown(self) -> float:
        """Its time over the exact step's."""
        return self.seconds / self.exact_seconds

    @property
    def training(self) -> Training:
        """How training differs from the exact step's: gradient, updates, precision, trained parameters."""
        return self.record.training

    @property
    def gradient(self) -> Gradient:
        """What the schemes declare about the gradient."""
        return self.training.gradient

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return a training setup with the plan's schemes; its model is changed in place.

        The optimizer is made by the setup's own ``make_optimizer``: where :attr:`optimizer` names another one, such as
        ``adamw-fused``, let it make that. What is raised is that of :func:`actbench.apply`.
        """
        from actbench.scheme import apply

        return setup if self.spec == "exact" else apply(setup, self.spec)

    def convert(self, model: Module) -> Module:
        """Return a model with the plan's schemes, changed in place.

        What is raised is that of :func:`actbench.convert`, a ConversionError also for schemes of the whole step, such
        as micro-batches and packed optimizer state, which need :meth:`apply`.
        """
        from actbench.tools.convert.model import convert

        return model if self.spec == "exact" else convert(model, self.spec)

    def __repr__(self) -> str:
        """Return the schemes, with what a step needs and how long it takes."""
        return f"<PlannedStep {self.spec}: {format_bytes(self.need_bytes)}, {self.slowdown:.2f}x the exact step's time>"

    @property
    def case(self) -> Case:
        """Its case with the memory limit of the request; for a frontier it may have been simulated with less."""
        limit = self.record.asked.limit_bytes or self.record.case.memory_limit_bytes
        return self.record.case.model_copy(update={"memory_limit_bytes": limit})

    @property
    def is_unchanged(self) -> bool:
        """Whether it is the model with its own optimizer, and without any scheme: there is nothing to paste."""
        return self.spec == "exact" and self.optimizer == self.record.asked.optimizer

    @property
    def is_uniform(self) -> bool:
        """Whether it does the same with all blocks."""
        return is_uniform(self.spec, self.blocks)

    @property
    def name(self) -> str:
        """The plan in short, without what every plan has: ``checkpoint blocks 0-10, chunked_loss:8``."""
        return self._described(short)

    @property
    def words(self) -> str:
        """The plan in words."""
        return self._described(sentence)

    def _described(self, describe: Callable[[str, Sequence[str], str], str]) -> str:
        asked, text = self.record.asked, describe(self.spec, self.blocks, self.record.asked.scheme)
        if self.optimizer in (None, asked.optimizer):
            return text
        return str(self.optimizer) if self.spec == asked.scheme else f"{text}, {self.optimizer}"
