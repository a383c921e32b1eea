from __future__ import annotations

from typing import ClassVar

from actbench.schemes.base import Change, Scheme
from actbench.setup import TrainingSetup


class Exact(Scheme):
    """The model as it is. Every ratio in a table is against this row."""

    name: ClassVar[str] = "exact"
    summary: ClassVar[str] = "the model as it is; the row that ratios are against"
    rank: ClassVar[int] = 0

    @classmethod
    def worth_trying(cls, batch_size: int) -> tuple[str, ...]:
        """Nothing: it is what the others are tried against."""
        return ()

    @property
    def changes(self) -> tuple[Change, ...]:
        """Nothing."""
        return ()

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup unchanged."""
        return setup
