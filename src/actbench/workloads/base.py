from __future__ import annotations

from typing import Protocol

from actbench.setup import Batch, TrainingSetup


class Workload(Protocol):
    """A model, how to make a batch of n for it, and its scalar loss.

    Attributes:
        spec: The model specification that was asked for.
        weights_origin: Where the weights come from: ``random``, ``pretrained:NAME``, ``folder:PATH``, ``function``,
            or ``not loaded (shapes only)``; known after :meth:`setup`.
        warnings: What a user must know of how the model was found; known after :meth:`setup`.
    """

    spec: str
    weights_origin: str
    warnings: tuple[str, ...]

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the model in training mode with its loss and optimizer.

        Args:
            materialize: False when only shapes are wanted: parameters may then be on the meta device.
            seed: Seeds the random initialisation.

        Raises:
            ModelError: The model cannot be found, read or built.
        """
        ...

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make a batch on the CPU, or of fake tensors when a fake tensor mode is active."""
        ...
