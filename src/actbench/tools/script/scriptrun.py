"""What all runs of a script share: a block around its training steps, which ends by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from actbench import livememory
from actbench.model.measured import Measurement
from actbench.tools.script.steps.counting import Step
from actbench.tools.script.steps.ending import Ending
from actbench.tools.script.steps.lines import Lines
from actbench.tools.script.steps.steps import Ended, Steps

TIMED = 3
"""Steps that are only timed on a real device, after those whose bytes are read."""


class ScriptRun(ABC):
    """A block around a script's training steps.

    Args:
        steps: Steps that are read; None until two in a row are equal.
        folder: Files below it are the user's.
        script: The user's file, if it is somewhere else.
        stepped: Told of each step that ended, and of its number.
        ended: Told of the measurement of a script that goes on when its run has ended.
    """

    steps: Steps

    def __init__(
        self,
        *,
        steps: int | None = None,
        folder: Path | None = None,
        script: Path | None = None,
        stepped: Callable[[int, Step], object] = lambda number, step: None,
        ended: Callable[[Measurement], object] = lambda found: None,
    ) -> None:
        self.lines = Lines(folder or Path.cwd(), script)
        self._limit, self._stepped = steps, stepped
        self._live = livememory.listening()
        self.ending = Ending(lambda: ended(self.measurement))
        self._stack = ExitStack()

    def _finish(self) -> None:
        """End what is open when the script has come to its own end."""
        with suppress(Ended):
            self.steps.finish(has_run=self._has_run())

    def _has_run(self) -> bool:
        """Return whether a script that trained nothing has run a model that is measured."""
        return False

    @property
    @abstractmethod
    def measurement(self) -> Measurement:
        """What was read; a MeasurementError if no step ended."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._finish()
        self.ending.done()
        if isinstance(error, Ended):
            self._stack.close()
            return True
        return bool(self._stack.__exit__(kind, error, trace))
