"""What an experiment tells of its progress, shown as a live table, a bar, or plain lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from actbench.model.data import CaseData, OutcomeData
from actbench.model.measured import OVER_THE_LIMIT, Outcome
from actbench.model.records import Case
from actbench.report.plain import plain
from actbench.run.columns import CountColumn, LeftColumn
from actbench.run.pace import Paces
from actbench.units import format_bytes, format_seconds


class Progress:
    """Is told what happens in an experiment, and shows nothing; subclasses override what they show.

    Cases that run side by side may tell it from several threads.
    """

    def planned(self, cases: Sequence[CaseData], jobs: int = 1, *, more: bool = False) -> None:
        """These cases will be run, simulated ones up to ``jobs`` at a time; of others it is told no more.

        ``more`` is whether nobody knows yet how many will follow, as in a search.
        """

    def started(self, case: CaseData, steps: int = 0, done: int = 0) -> None:
        """The case starts, or starts afresh; a training run after ``done`` of its ``steps``."""

    def memory_read(self, case: Case, peak_bytes: int) -> None:
        """The peak of the case is known."""

    def round_timed(self, case: Case, steps: int) -> None:
        """One more round of the case was timed; ``steps`` counts its steps so far."""

    def measured(self, case: Case, outcome: Outcome) -> None:
        """The record of the case is stored, and the search for its largest batch is to come."""

    def searching(self, case: Case) -> None:
        """The search for the case's largest batch starts, with a prediction."""

    def tried(self, case: Case, batch_size: int, fits: bool) -> None:
        """The search for the case's largest batch tried one."""

    def stepped(self, done: int, loss: float) -> None:
        """The training run took one more step, ``done`` so far."""

    def said(self, case: Case, text: str) -> None:
        """Something that the user should know of the case, such as that a simulated step takes long."""

    def finished(self, case: CaseData, outcome: OutcomeData) -> None:
        """The case ended and its record is stored."""

    def message(self, text: str) -> None:
        """Something that the user should know."""


_ROWS_KEPT_FREE = 6  # for the table's frame, its head and the bar
_WORTH_TELLING_SECONDS = 10.0
_NUMBERS = {"batch", "bits", "size", "peak", "time"}


@contextmanager
def shown(console: Console | None = None, *, as_bar: bool = False, as_lines: bool = False) -> Iterator[Progress]:
    """Show the progress that is told inside the block, on standard error unless given a console.

    With ``as_bar`` a terminal gets a bar of the steps of the training run, in place of a table of all cases; with
    ``as_lines`` it gets lines, as a pipe does, between which others may print.
    """
    console = console or Console(stderr=True)
    if as_lines or not console.is_terminal:
        yield ProgressLines(console)
    elif as_bar:
        run = _RunBar(console)
        with run.bar:
            yield run
    else:
        table = LiveTable(console)
        with Live(table, console=console, refresh_per_second=4, transient=True):
            yield table


class ProgressLines(Progress):
    """Progress as one line for each case that starts, and one for each that ended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total: int | None = 0
        self._pace = Paces()
        self._began = self._spoke = time.monotonic()

    def planned(self, cases: Sequence[CaseData], jobs: int = 1, *, more: bool = False) -> None:
        """Remember how many there are; time is counted from now where none of them is among those that ended."""
        self._total = None if more else len(cases)
        ended_before = self._pace.ended
        self._pace.planned(cases)
        if ended_before and not self._pace.ended:
            self._began = time.monotonic()

    def started(self, case: CaseData, steps: int = 0, done: int = 0) -> None:
        """Write that the case starts."""
        self._pace.started(case)
        self.message(f"starts: {case.title}")

    def finished(self, case: CaseData, outcome: OutcomeData) -> None:
        """Write how the case ended."""
        self._pace.finished(case)
        ended = self._pace.ended
        count = ended if self._total is None else f"{ended}/{self._total}"
        self.message(f"[{count}] {case.title}: {outcome.ending}{self._times()}")

    def round_timed(self, case: Case, steps: int) -> None:
        """Write how many steps were timed, if nothing was written for a while: cases that are compared end together."""
        if time.monotonic() - self._spoke >= _WORTH_TELLING_SECONDS:
            self.message(f"{case.title}: {steps} steps timed, in turns with the others{self._times()}")

    def measured(self, case: Case, outcome: Outcome) -> None:
        """Write what was measured."""
        self._pace.measured(case)
        self.message(f"measured: {case.title}: {outcome.ending}; the search for its largest batch follows")

    def searching(self, case: Case) -> None:
        """Write that the search starts."""
        self._pace.searching(case)
        self.message(f"searches: {case.title}")

    def tried(self, case: Case, batch_size: int, fits: bool) -> None:
        """Write how the trial ended."""
        self.message(f"{case.title}: batch {batch_size} {_said(fits)}{self._times()}")

    def said(self, case: Case, text: str) -> None:
        """Write it."""
        self.message(f"{case.title}: {text}")

    def _times(self) -> str:
        """Return how long all has taken and may still take, once that is worth a word."""
        spent = time.monotonic() - self._began
        if spent < _WORTH_TELLING_SECONDS:
            return ""
        left = None if self._total is None else self._pace.seconds_left()
        about = f", about {format_seconds(left)} left" if left and left >= 1 else ""
        return f" (after {format_seconds(spent)}{about})"

    def message(self, text: str) -> None:
        """Write the message."""
        self._spoke = time.monotonic()
        self._console.print(Text(plain(text)), soft_wrap=True)


class _RunBar(ProgressLines):
    """Progress as a bar of the current training run, below a line for each that ended."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[loss]}"),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self.bar.add_task("", total=None, loss="")

    def started(self, case: CaseData, steps: int = 0, done: int = 0) -> None:
        self._pace.started(case)
        self.bar.reset(self._task, total=steps, completed=done, description=plain(case.title), loss="")

    def stepped(self, done: int, loss: float) -> None:
        self.bar.update(self._task, completed=done, loss=f"loss {loss:.4g}")


@dataclass
class _Row:
    """What is shown of one case; times are readings of ``time.monotonic``."""

    state: str = "waiting"
    peak: str = ""
    started: float | None = None
    ended: float | None = None

    @property
    def elapsed(self) -> str:
        if self.started is None:
            return ""
        return format_seconds(round((self.ended or time.monotonic()) - self.started, 1) or 0.1)

    @property
    def style(self) -> str:
        if self.ended is None:
            return "dim" if self.started is None else "bold"
        return {"measured": "green", OVER_THE_LIMIT: "yellow"}.get(self.state, "red")


class LiveTable(Progress):
    """Progress as a table with a line for each case, scrolled to those at work, and a bar with the remaining time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[CaseData, _Row] = {}
        self._lock = threading.Lock()
        self._pace = Paces()
        self._bar = bars.Progress(
            CountColumn(), bars.BarColumn(), bars.TimeElapsedColumn(), LeftColumn(self._pace), console=console
        )
        self._task = self._bar.add_task("cases", total=0)

    def planned(self, cases: Sequence[CaseData], jobs: int = 1, *, more: bool = False) -> None:
        """Show the cases that have not started as waiting."""
        with self._lock:
            self._rows = {case: self._rows.get(case, _Row()) for case in cases}
        self._pace.planned(cases)
        if more:
            self._bar.tasks[0].total = None  # update() takes None for no change
        self._bar.update(self._task, total=None if more else len(cases), completed=self._pace.ended)

    def started(self, case: CaseData, steps: int = 0, done: int = 0) -> None:
        """Show the case at work."""
        self._pace.started(case)
        row = self._rows[case]
        row.state, row.started = case.first_state, time.monotonic()

    def memory_read(self, case: Case, peak_bytes: int) -> None:
        """Show the peak."""
        row = self._rows[case]
        row.state, row.peak = "waiting for its turn", format_bytes(peak_bytes)

    def round_timed(self, case: Case, steps: int) -> None:
        """Show how many steps were timed."""
        self._rows[case].state = f"{steps} steps timed"

    def measured(self, case: Case, outcome: Outcome) -> None:
        """Show that the case waits for its search."""
        self._pace.measured(case)
        self._rows[case].state = "waiting for its search"

    def searching(self, case: Case) -> None:
        """Show the case at work."""
        self._pace.searching(case)
        row = self._rows[case]
        row.state, row.started = "predicts", row.started or time.monotonic()

    def tried(self, case: Case, batch_size: int, fits: bool) -> None:
        """Show the batch that was tried last."""
        self._rows[case].state = f"batch {batch_size} {_said(fits)}"

    def finished(self, case: CaseData, outcome: OutcomeData) -> None:
        """Show how the case ended."""
        self._pace.finished(case)
        row = self._rows[case]
        row.ended = time.monotonic()
        row.state = outcome.state
        if (peak_bytes := getattr(outcome, "peak_bytes", None)) is not None:
            row.peak = format_bytes(peak_bytes)
        self._bar.advance(self._task)

    def said(self, case: Case, text: str) -> None:
        """Write it above the table."""
        self.message(f"{case.title}: {text}")

    def message(self, text: str) -> None:
        """Write the message above the table, where it stays."""
        self._console.print(Text(plain(text)))

    def __rich__(self) -> RenderableType:
        """Draw the table and the bar."""
        with self._lock:
            rows = list(self._rows.items())
        table = Table(expand=True)
        for heading in (*(rows[0][0].cells if rows else ()), "state", "peak", "time"):
            table.add_column(heading, no_wrap=True, justify="right" if heading in _NUMBERS else "left")
        for case, row in _window(rows, max(1, self._console.height - _ROWS_KEPT_FREE)):
            shown_cells = (*case.cells.values(), row.state, row.peak, row.elapsed)
            table.add_row(*(Text(plain(cell)) for cell in shown_cells), style=row.style)
        return Group(table, self._bar)


def _said(fits: bool) -> str:
    return "fits" if fits else "does not fit"


def _window(rows: list[tuple[CaseData, _Row]], height: int) -> list[tuple[CaseData, _Row]]:
    """Return the rows around the first that has not ended."""
    at = next((index for index, (_, row) in enumerate(rows) if row.ended is None), len(rows))
    start = max(0, min(at - height // 3, len(rows) - height))
    return rows[start : start + height]
