"""A sweep's progress on the terminal's standard error: a live table, or plain lines where there is no terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from actbench.plain import plain
from actbench.records import Case, Failure, Outcome
from actbench.runner.progress import Progress, Silent
from actbench.units import format_bytes, format_seconds

_ROWS_KEPT_FREE = 6  # for the table's frame, its head and the bar
_ETA_WINDOW_SECONDS = 3600.0


@contextmanager
def shown(console: Console | None = None) -> Iterator[Progress]:
    """Show the progress that is told inside the block.

    Args:
        console: Where; standard error unless given.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield Lines(console)
        return
    table = LiveTable(console)
    with Live(table, console=console, refresh_per_second=4, transient=True):
        yield table


class Lines(Silent):
    """Progress as one line for each case that ended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = 0
        self._ended = 0

    def planned(self, cases: Sequence[Case], jobs: int) -> None:
        """Remember how many there are."""
        self._total = len(cases)

    def finished(self, case: Case, outcome: Outcome) -> None:
        """Write how the case ended."""
        self._ended += 1
        self._write(f"[{self._ended}/{self._total}] {_name(case)}: {_ending(outcome)}")

    def message(self, text: str) -> None:
        """Write the message."""
        self._write(text)

    def _write(self, text: str) -> None:
        self._console.print(Text(plain(text)), soft_wrap=True)


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
        return "green" if self.state == "measured" else "red"


class LiveTable:
    """Progress as a table with a line for each case, those at work in sight, and a bar with the time that is left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[Case, _Row] = {}
        self._lock = threading.Lock()
        self._bar = Bar(
            TextColumn("{task.completed:.0f} of {task.total:.0f} cases"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=_ETA_WINDOW_SECONDS,
        )
        self._task = self._bar.add_task("cases", total=0)
        self._skipped = 0

    def planned(self, cases: Sequence[Case], jobs: int) -> None:
        """Show all cases as waiting."""
        with self._lock:
            self._rows = {case: _Row() for case in cases}
        self._bar.update(self._task, total=len(cases))

    def skipped(self, case: Case) -> None:
        """Count the case among those that were done before."""
        self._skipped += 1

    def started(self, case: Case) -> None:
        """Show the case at work."""
        row = self._rows[case]
        row.state, row.started = "memory", time.monotonic()

    def memory_read(self, case: Case, peak_bytes: int) -> None:
        """Show the peak."""
        row = self._rows[case]
        row.state, row.peak = "waiting for its turn", format_bytes(peak_bytes)

    def round_timed(self, case: Case, steps: int) -> None:
        """Show how many steps were timed."""
        self._rows[case].state = f"{steps} steps timed"

    def tried(self, case: Case, batch_size: int, fits: bool) -> None:
        """Show the batch that was tried last."""
        self._rows[case].state = f"batch {batch_size} {'fits' if fits else 'does not fit'}"

    def finished(self, case: Case, outcome: Outcome) -> None:
        """Show how the case ended; a failure stays on the terminal after the table is gone."""
        row = self._rows[case]
        row.ended = time.monotonic()
        row.state = outcome.reason if isinstance(outcome, Failure) else "measured"
        if outcome.peak_bytes is not None:
            row.peak = format_bytes(outcome.peak_bytes)
        self._bar.advance(self._task)
        if isinstance(outcome, Failure):
            self.message(f"{_name(case)}: {_ending(outcome)}")

    def message(self, text: str) -> None:
        """Write the message above the table, where it stays."""
        self._console.print(Text(plain(text)))

    def __rich__(self) -> RenderableType:
        """Draw the table and the bar."""
        table = Table(expand=True)
        for heading in ("model", "scheme", "batch", "meter", "state", "peak", "time"):
            table.add_column(heading, no_wrap=True, justify="right" if heading in ("batch", "peak", "time") else "left")
        with self._lock:
            rows = list(self._rows.items())
        for case, row in _window(rows, max(1, self._console.height - _ROWS_KEPT_FREE)):
            cells = (case.model, case.scheme, str(case.batch_size), case.meter, row.state, row.peak, row.elapsed)
            table.add_row(*(Text(plain(cell)) for cell in cells), style=row.style)
        done_before = [Text(f"{self._skipped} done before")] if self._skipped else []
        return Group(table, *done_before, self._bar)


def _window(rows: list[tuple[Case, _Row]], height: int) -> list[tuple[Case, _Row]]:
    """Return the rows around the first that has not ended."""
    at = next((index for index, (_, row) in enumerate(rows) if row.ended is None), len(rows))
    start = max(0, min(at - height // 3, len(rows) - height))
    return rows[start : start + height]


def _name(case: Case) -> str:
    return f"{case.model} {case.scheme}, batch {case.batch_size}, {case.meter}"


def _ending(outcome: Outcome) -> str:
    if isinstance(outcome, Failure):
        return f"failed, {outcome.reason}: {outcome.message.splitlines()[0] if outcome.message else 'no message'}"
    largest = "" if outcome.largest_batch is None else f", largest batch {outcome.largest_batch}"
    return f"peak {format_bytes(outcome.peak_bytes)}{largest}"
