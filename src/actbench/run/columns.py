"""Columns of a progress bar whose number of cases may be unknown."""

from __future__ import annotations

from datetime import timedelta

from rich.progress import ProgressColumn, Task
from rich.text import Text

from actbench.run.pace import Paces


class CountColumn(ProgressColumn):
    """How many cases ended, and of how many, if that is known."""

    def render(self, task: Task) -> Text:
        """Return the cell of a bar."""
        done = f"{task.completed:.0f}"
        return Text(f"{done} done" if task.total is None else f"{done} of {task.total:.0f} cases")


class LeftColumn(ProgressColumn):
    """The time that is left, if that is known."""

    def __init__(self, pace: Paces) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        """Return the cell of a bar."""
        if task.total is None:
            return Text()
        seconds = self._pace.seconds_left()
        known = "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))
        return Text(f"left: {known}", "progress.remaining")
