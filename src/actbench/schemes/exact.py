from __future__ import annotations

from typing import ClassVar

from actbench.schemes.base import Change, Scheme
from actbench.setup import TrainingSetup


class Exact(Scheme):
    """The unchanged model. Every ratio in a table is relative to this row."""

    name: ClassVar[str] = "exact"
    summary: ClassVar[str] = "the model as it is; the row that ratios are against"
    rank: ClassVar[int] = 0
    variants: ClassVar[tuple[str, ...]] = ()  # the others are compared with it
    changes: ClassVar[tuple[Change, ...]] = ()

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup unchanged."""
        return setup
