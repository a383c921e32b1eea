"""The progress of training runs, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from actbench.plain import plain
from actbench.records import Failure
from actbench.runs.records import TrainingCase, TrainingRun


@contextmanager
def shown() -> Iterator[Bars]:
    """Show the progress that is told inside the block; what is no terminal gets one line for each run that ended."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield Bars(console, bar)


class Bars:
    """A bar for the run at work, and a line for each that ended."""

    def __init__(self, console: Console, bar: Progress) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task("", total=None, loss="")
        self._runs = self._ended = 0

    def planned(self, runs: int, done_before: int) -> None:
        """Remember how many there are."""
        self._runs = runs

    def started(self, case: TrainingCase, steps: int, done: int) -> None:
        """Begin the bar of a run."""
        self._bar.reset(self._task, total=steps, completed=done, description=plain(_name(case)), loss="")

    def stepped(self, done: int, loss: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, loss=f"loss {loss:.4g}")

    def finished(self, run: TrainingRun) -> None:
        """Write how the run ended."""
        self._ended += 1
        outcome = run.outcome
        if isinstance(outcome, Failure):
            ending = f"failed, {outcome.reason}"
        else:
            final = outcome.final
            score = (
                f"correlation {outcome.score:.3f}"
                if final.accuracy is None
                else f"accuracy {100 * final.accuracy:.1f} %"
            )
            ending = f"{score}, loss {final.loss:.4g}"
            ending += "" if outcome.diverged_at is None else f", diverged at step {outcome.diverged_at}"
        line = plain(f"[{self._ended}/{self._runs}] {_name(run.case)}: {ending}")
        self._console.print(Text(line), soft_wrap=True)


def _name(case: TrainingCase) -> str:
    return f"{case.model} on {case.data}, {case.scheme}, seed {case.seed}"
