"""Scripts that train nothing: what their models hold is read while these run, as a script may drop them at its end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from actbench.tools.script.steps.lines import Lines
from actbench.tools.script.steps.reading import Held
from actbench.tools.script.steps.steps import Steps


class Untrained:
    """Reads what a script holds each time that another model has run, until an optimizer is made.

    Args:
        steps: The steps of the script.
        lines: The lines of the script, with its models.
        read: Returns what the script holds now.

    Attributes:
        held: What was read last; None if no model ran before there was an optimizer.
    """

    def __init__(self, steps: Steps, lines: Lines, read: Callable[[], Held]) -> None:
        self._steps, self._lines, self._read, self._models = steps, lines, read, 0
        self.held: Held | None = None

    def ran(self) -> None:
        """Note that a model has run, unless its weights have no storages, as within ``torch.func.vmap``."""
        models = len(self._lines.roots)
        if models != self._models and self._steps.are_unasked and not torch._C._are_functorch_transforms_active():
            self.held, self._models = self._read(), models
