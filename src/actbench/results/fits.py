"""The records of ``actbench fit``: one for each stack of schemes that was tried."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, get_args

from pydantic import Field

from actbench.results.measured import Measurement
from actbench.results.records import Case, Data, Failure, Migrations, Optimizer, Record

Gradient = Literal["exact", "unbiased", "approximate"]
"""How a gradient compares with the exact step's: equal to rounding, right on average, or neither."""

GRADIENTS: Final[tuple[Gradient, ...]] = get_args(Gradient)

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
