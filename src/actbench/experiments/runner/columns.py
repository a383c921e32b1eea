"""Columns of a progress bar whose number of cases may be unknown."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text


class CountColumn(ProgressColumn):
    """How many cases ended, and of how many, if that is known."""

    def render(self, task: Task) -> Text:
        """Return the cell of a bar."""
        done = f"{task.completed:.0f}"
        return Text(f"{done} done" if task.total is None else f"{done} of {task.total:.0f} cases")


class LeftColumn(TimeRemainingColumn):
    """The time that is left, if that is known."""

    def render(self, task: Task) -> Text:
        """Return the cell of a bar."""
        return Text() if task.total is None else Text("left: ") + super().render(task)
