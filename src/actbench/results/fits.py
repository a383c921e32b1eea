"""What is written down of ``actbench fit``: a record for each stack of schemes that was tried."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, get_args

from pydantic import Field

from actbench.results.measured import Measurement
from actbench.results.records import Case, Data, Failure, Migrations, Optimizer, Record

Gradient = Literal["exact", "unbiased", "approximate"]
"""What a gradient is against the exact step's: the same to rounding, right on average, or neither."""

GRADIENTS: Final[tuple[Gradient, ...]] = get_args(Gradient)

Trained = Literal["all", "adapters"]
"""What is trained: all parameters that the model trains, or other and fewer ones."""


class Training(Data):
    """In what the training with a stack of schemes differs from that of the exact step.

    Attributes:
        trained: Whether it trains the model's own parameters.
        gradient: What the gradient is, as the schemes declare; precision has a field of its own.
        updates: Whether the optimizer makes the same of a gradient.
        precision: Whether is computed in the case's own types.
    """

    trained: Trained = "all"
    gradient: Gradient = "exact"
    updates: Literal["same", "other"] = "same"
    precision: Literal["same", "other"] = "same"

    @property
    def is_exact(self) -> bool:
        """Whether it is the exact step's, to rounding."""
        return self == Training()

    def is_as_near(self, other: Training) -> bool:
        """Whether it is in nothing further from the exact step than another, and trains the same."""
        return self.trained == other.trained and all(
            mine <= theirs for mine, theirs in zip(self._distance, other._distance, strict=True)
        )

    @property
    def _distance(self) -> tuple[int, bool, bool]:
        return GRADIENTS.index(self.gradient), self.updates == "other", self.precision == "other"


class Asked(Data):
    """What a fit was asked for, beside the case of the exact step.

    Attributes:
        max_slowdown: A stack may take so many times the exact step's estimated time.
        exact: Whether only the exact step's training counts.
        optimizer: That of the exact step.
        others: Optimizers that may take its place, and make other updates.
    """

    max_slowdown: Annotated[float, Field(ge=1)] = 2.0
    exact: bool = False
    optimizer: Optimizer | None = None
    others: tuple[Optimizer, ...] = ()


class FitRecord(Record[Case, Annotated[Measurement | Failure, Field(discriminator="kind")]]):
    """One line of a file of fits."""

    migrations: ClassVar[Migrations] = {}

    asked: Asked = Asked()
    training: Training = Training()


def step_seconds_of(measured: Measurement) -> float | None:
    """Return the estimated seconds of a step; None where the device that it was simulated for has no rates."""
    return None if measured.estimated is None else measured.estimated.step_seconds
