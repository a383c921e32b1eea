"""Progress on a terminal: a live table, with the memory of what runs if asked for, or a bar; a pipe gets lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TextIO, cast

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress import ProgressColumn, Task
from rich.table import Table
from rich.text import Text

from actbench.model.data import LEFT_OUT, CaseData, OutcomeData
from actbench.model.live import HOLDERS, LiveMemory
from actbench.model.measured import OVER_THE_LIMIT, Outcome
from actbench.model.records import Case
from actbench.report.plain import plain
from actbench.run.memorypanel import SeenMemory, memory_panel
from actbench.run.pace import Paces
from actbench.run.progress import Progress, names_among
from actbench.run.progresslines import ProgressLines, verdict
from actbench.units import counted, format_bytes, format_seconds

_ROWS_KEPT_FREE = 7  # for the table's frame, its head, the bar and the line below it
_NUMBERS = {"batch", "bits", "size", "peak", "time"}


@contextmanager
def shown(
    console: Console | None = None,
    *,
    as_bar: bool = False,
    as_lines: bool = False,
    verbose: bool = False,
    live: bool = False,
) -> Iterator[Progress]:
    """Show the progress that is told inside the block, on standard error unless given a console.

    With ``as_bar`` a terminal gets a bar of the steps of the training run, in place of a table of all cases; with
    ``as_lines`` it gets lines, as a pipe does, between which others may print; with ``verbose`` a line for each case
    that starts or ends. With ``live`` a terminal that can redraw lines gets, in place of these, a table with the memory
    of the cases that run; any other stream gets what it gets without it.
    """
    console = console or Console(stderr=True)
    if live and console.is_terminal and not console.is_dumb_terminal:
        view = LiveMemoryTable(console)
        with Live(
            view, console=console, refresh_per_second=4, transient=True, redirect_stdout=False, redirect_stderr=False
        ):
            yield view
    elif as_lines or verbose or not console.is_terminal:
        lines = ProgressLines(console, verbose=verbose)
        with lines.ticking():
            yield lines
    elif as_bar:
        run = _RunBar(console)
        with run.bar:
            yield run
    else:
        table = LiveTable(console)
        with Live(table, console=console, refresh_per_second=4, transient=True):
            yield table


class _RunBar(ProgressLines):
    """Progress as a bar of the current training run, below a line for each that ended."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, verbose=True)
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
        return {"measured": "green", OVER_THE_LIMIT: "yellow", LEFT_OUT: "dim"}.get(self.state, "red")


class LiveTable(Progress):
    """Progress as a table with a line for each case, scrolled to those at work, and a bar with the remaining time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[CaseData, _Row] = {}
        self._names: dict[CaseData, str] = {}
        self._lock = threading.Lock()
        self._pace = Paces()
        self._bar = bars.Progress(
            CountColumn(), bars.BarColumn(), bars.TimeElapsedColumn(), LeftColumn(self._pace), console=console
        )
        self._task = self._bar.add_task("cases", total=0)
        self._doing = "getting ready"

    def planned(self, cases: Sequence[CaseData], jobs: int = 1, *, more: bool = False) -> None:
        """Show the cases that have not started as waiting."""
        with self._lock:
            self._rows = {case: self._rows.get(case, _Row()) for case in cases}
        self._pace.planned(cases)
        self._names = names_among(cases)
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
        self._rows[case].state = f"{counted(steps, 'step')} timed"

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
        self._rows[case].state = f"batch {batch_size} {verdict(fits)}"

    def finished(self, case: CaseData, outcome: OutcomeData) -> None:
        """Show how the case ended."""
        self._pace.finished(case)
        row = self._rows[case]
        row.ended = time.monotonic()
        row.state = outcome.state
        if (peak_bytes := getattr(outcome, "peak_bytes", None)) is not None:
            row.peak = format_bytes(peak_bytes)
        self._bar.advance(self._task)

    def doing(self, text: str) -> None:
        """Show the text below the bar for as long as no case is at work."""
        self._doing = text

    def noted(self, case: Case, text: str) -> None:
        """Write the text above the table."""
        self.message(f"{self._names.get(case, case.title)}: {text}")

    def message(self, text: str) -> None:
        """Write the message above the table, where it stays."""
        self._console.print(Text(plain(text)))

    def __rich__(self) -> RenderableType:
        """Draw the table and the bar."""
        return self._table(self._console.height - _ROWS_KEPT_FREE)

    def _table(self, height: int) -> RenderableType:
        """Return the table with so many rows, at least one, and the bar."""
        with self._lock:
            rows = list(self._rows.items())
        table = Table(expand=True)
        for heading in (*(rows[0][0].cells if rows else ()), "state", "peak", "time"):
            table.add_column(heading, no_wrap=True, justify="right" if heading in _NUMBERS else "left")
        for case, row in _window(rows, max(1, height)):
            shown_cells = (*case.cells.values(), row.state, row.peak, row.elapsed)
            table.add_row(*(Text(plain(cell)) for cell in shown_cells), style=row.style)
        is_search = self._bar.tasks[0].total is None  # whose cases say little of what it is after
        is_idle = is_search or not any(row.started is not None and row.ended is None for _, row in rows)
        return Group(table, self._bar, *([Text(plain(f"{self._doing} …"), style="dim")] if is_idle else []))


_MOST_PANELS: Final = 2
_PANEL_LINES: Final = 10  # without its holders
_FEWEST_ROWS: Final = 3  # of the table above panels


class LiveMemoryTable(LiveTable):
    """The table, if there are several cases, and the memory of those at work below it."""

    is_live = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._seen: dict[CaseData, SeenMemory] = {}

    def started(self, case: CaseData, steps: int = 0, done: int = 0) -> None:
        """Show the case at work, with no memory yet."""
        super().started(case, steps, done)
        with self._lock:
            self._seen[case] = SeenMemory()

    def reported(self, case: Case, report: LiveMemory) -> None:
        """Note the memory of the case."""
        with self._lock:
            if case in self._seen:
                self._seen[case].add(report)

    def noted(self, case: Case, text: str) -> None:
        """Show the text below the memory of the case, in place of the one before."""
        with self._lock:
            seen = self._seen.get(case)
            if seen is not None:
                seen.said = text
        if seen is None:
            super().noted(case, text)

    def tried(self, case: Case, batch_size: int, fits: bool) -> None:
        """Show the batch that was tried last."""
        super().tried(case, batch_size, fits)
        with self._lock:
            if case in self._seen:
                self._seen[case].said = self._rows[case].state

    def finished(self, case: CaseData, outcome: OutcomeData) -> None:
        """Show how the case ended, and its memory no longer."""
        super().finished(case, outcome)
        with self._lock:
            self._seen.pop(case, None)

    def stream(self, own: TextIO) -> TextIO:
        """Return the place above the table for what would go to the terminal; a file or a pipe is its own."""
        return cast("TextIO", FileProxy(self._console, own)) if own.isatty() else own

    def __rich__(self) -> RenderableType:
        """Draw the table, and a panel for each of the first that report their memory; one case alone needs no table."""
        with self._lock:
            rows = dict(self._rows)
            is_alone = len(rows) <= 1
            known = [(case, seen) for case, seen in self._seen.items() if is_alone or seen.last is not None]
        at_work = known[:_MOST_PANELS]
        if is_alone and not at_work:
            return Text(plain(f"{self._doing} …"), style="dim")
        height = self._console.height - (1 if is_alone else _ROWS_KEPT_FREE + _FEWEST_ROWS)
        holders = max(0, min(HOLDERS, height // max(1, len(at_work)) - _PANEL_LINES))
        panels = [
            memory_panel(
                self._names.get(case, case.title),
                seen,
                self._console.width,
                elapsed=rows[case].elapsed,
                holders=holders,
                ascii_only=self._console.options.ascii_only,
            )
            for case, seen in at_work
        ]
        taken = len(panels) * (_PANEL_LINES + holders)
        return Group(*([] if is_alone else [self._table(self._console.height - _ROWS_KEPT_FREE - taken)]), *panels)


def _window(rows: list[tuple[CaseData, _Row]], height: int) -> list[tuple[CaseData, _Row]]:
    """Return the rows around the first that has not ended."""
    at = next((index for index, (_, row) in enumerate(rows) if row.ended is None), len(rows))
    start = max(0, min(at - height // 3, len(rows) - height))
    return rows[start : start + height]


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
