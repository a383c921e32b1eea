"""How far training with a plan may differ from the exact step's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from actbench.model.gradient import GRADIENTS, Gradient
from actbench.tools.fit.records import Trained, Training


@dataclass(frozen=True)
class Level:
    """How far training may differ from the exact step's."""

    name: str
    furthest: Training

    def allows(self, training: Training) -> bool:
        """Whether training differs no more than this."""
        return training.is_as_near(self.furthest)


def _level(name: str, trained: Trained, gradient: Gradient, others: Literal["same", "other"]) -> Level:
    return Level(name, Training(trained=trained, gradient=gradient, updates=others, precision=others))


EXACT = _level("exact", "all", "exact", "same")
ANY = _level("any gradients", "all", GRADIENTS[-1], "same")
LEVELS = (
    EXACT,
    *(
        _level(f"{trained}, {gradient}, {others}", trained, gradient, others)
        for trained in get_args(Trained)
        for others in ("same", "other")
        for gradient in GRADIENTS
        if (trained, gradient, others) != ("all", "exact", "same")
    ),
)
