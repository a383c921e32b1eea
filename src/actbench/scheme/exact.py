from __future__ import annotations

from typing import ClassVar

from actbench.scheme.base import Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import TrainingSetup


class Exact(Scheme):
    """The unchanged model. Every ratio in a table is relative to this row."""

    name: ClassVar[str] = "exact"
    card: ClassVar[Card] = Card(
        summary="the unchanged model; other rows are compared with it",
        rank=0,
        variants=(),  # the others are compared with it
    )
    changes: ClassVar[tuple[Change, ...]] = ()

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup unchanged."""
        return setup
