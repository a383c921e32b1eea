"""How far from the exact step's training a search may go, one step after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from actbench.results.fits import GRADIENTS, Gradient, Trained, Training


@dataclass(frozen=True)
class Level:
    """How far training may be from the exact step's."""

    trained: Trained
    gradient: Gradient
    others: bool

    @property
    def training(self) -> Training:
        """The furthest."""
        other = "other" if self.others else "same"
        return Training(trained=self.trained, gradient=self.gradient, updates=other, precision=other)

    def allows(self, training: Training) -> bool:
        """Whether training is as near as that, but for what is trained."""
        return training.model_copy(update={"trained": self.trained}).is_as_near(self.training)


EXACT = Level("all", "exact", others=False)
LEVELS = (EXACT, *(Level(trained, gradient, True) for gradient in GRADIENTS for trained in get_args(Trained)))
