"""How far a search may go from the training of the exact step, level by level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from actbench.results.fits import GRADIENTS, Gradient, Trained, Training


@dataclass(frozen=True)
class Level:
    """How far training may differ from the exact step's."""

    trained: Trained
    gradient: Gradient
    others: bool

    @property
    def training(self) -> Training:
        """The training that differs most and is still allowed."""
        other = "other" if self.others else "same"
        return Training(trained=self.trained, gradient=self.gradient, updates=other, precision=other)

    def allows(self, training: Training) -> bool:
        """Whether training is as near to the exact step's as this level, apart from what is trained."""
        return training.model_copy(update={"trained": self.trained}).is_as_near(self.training)


EXACT = Level("all", "exact", others=False)
LEVELS = (
    EXACT,
    Level("adapters", "exact", others=False),  # what most people do where a large model does not fit
    *(Level(trained, gradient, True) for gradient in GRADIENTS for trained in get_args(Trained)),
)
