"""Model outputs that the training loop keeps alive until the next forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class RetainedOutputs:
    """Keeps the outputs of a model, as a loop does that assigns them to a variable, until the next forward pass.

    A copy, or one that is read from a file, is empty: the outputs are no part of the model.

    Attributes:
        outputs: What the model returned last.
        stays: Whether forward passes replace nothing, and keep no outputs of their own.
    """

    def __init__(self) -> None:
        self.outputs: Any = None
        self.stays = False

    def __reduce__(self) -> tuple[type[RetainedOutputs], tuple[()]]:
        return RetainedOutputs, ()

    def keep(self, module: Any, inputs: Any, outputs: Any) -> None:
        """Replace the kept outputs, as a forward hook of the model."""
        if not self.stays:
            self.outputs = outputs

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Keep the same outputs through all forward passes of the block."""
        self.stays = True
        try:
            yield
        finally:
            self.stays = False
