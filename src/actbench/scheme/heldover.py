"""What a loop holds from one step into the forward pass of the next, and a pass that leaves it alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class HeldOver:
    """What a loop holds from the step before, such as the model's outputs, until a forward pass replaces it.

    A copy, or one that is read from a file, is empty: what a loop holds is no part of the model that it runs.

    Attributes:
        outputs: What the model returned last.
        stays: Whether forward passes leave what is held as it is. Then they hold nothing of their own either.
    """

    def __init__(self) -> None:
        self.outputs: Any = None
        self.stays = False

    def __reduce__(self) -> tuple[type[HeldOver], tuple[()]]:
        return HeldOver, ()

    def keep(self, module: Any, inputs: Any, outputs: Any) -> None:
        """Hold the outputs of a module in place of those before, as its forward hook."""
        if not self.stays:
            self.outputs = outputs

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Let passes within leave what is held as it is."""
        self.stays = True
        try:
            yield
        finally:
            self.stays = False
