"""Progress as lines of text, for a pipe: one for each case that ends, and at least one every ten seconds.

Of the cases of a search and of trials of batches, whose number is unknown, there is one line a second at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.text import Text

from actbench.model.data import CaseData, OutcomeData
from actbench.model.measured import Outcome
from actbench.model.records import Case
from actbench.report.plain import plain
from actbench.report.sentences import names_of_cases
from actbench.run.pace import Paces
from actbench.run.progress import Progress, names_among
from actbench.units import counted, format_seconds

WORTH_TELLING_SECONDS: Final = 10.0
"""The longest silence, and the shortest run whose time is shown."""

_LEAST_SECONDS: Final = 1.0  # between two lines of progress
_LOOK_SECONDS: Final = 0.5
_NAMED: Final = 2  # cases at work that a line names


@dataclass
class _AtWork:
    """What is known of a case that started; ``since`` is a reading of ``time.monotonic``."""

    since: float = field(default_factory=lambda: time.monotonic())
    state: str = ""


class ProgressLines(Progress):
    """Progress as lines: how cases ended, and what goes on where none ended for a while.

    Of the cases of a search that end within a second, the last has a line, with their number.

    Args:
        console: Where lines go.
        verbose: Whether each case that starts or ends, of a search too, has a line of its own.
        silence_seconds: The longest time without a line.
    """

    def __init__(
        self, console: Console, *, verbose: bool = False, silence_seconds: float = WORTH_TELLING_SECONDS
    ) -> None:
        self._console = console
        self._verbose = verbose
        self._silence_seconds = silence_seconds
        self._lock = threading.RLock()
        self._total: int | None = 0
        self._pace = Paces()
        self._began = self._spoke = time.monotonic()
        self._told = self._began - _LEAST_SECONDS
        self._pending: str | None = None
        self._at_work: dict[CaseData, _AtWork] = {}
        self._together: tuple[Case, ...] = ()
        self._names: dict[CaseData, str] = {}
        self._doing = "getting ready"

    def planned(self, cases: Sequence[CaseData], jobs: int = 1, *, more: bool = False) -> None:
        """Remember how many there are; time is counted from now where none of them is among those that ended."""
        with self._lock:
            self._total = None if more else len(cases)
            ended_before = self._pace.ended
            self._pace.planned(cases)
            self._names = names_among(cases)
            if ended_before and not self._pace.ended:
                self._began = time.monotonic()

    def started(self, case: CaseData, steps: int = 0, done: int = 0) -> None:
        """Note that the case starts."""
        with self._lock:
            self._pace.started(case)
            self._at_work[case] = _AtWork()
            if self._verbose:
                self.message(f"starts: {self._name(case)}")

    def finished(self, case: CaseData, outcome: OutcomeData) -> None:
        """Tell how the case ended."""
        with self._lock:
            self._pace.finished(case)
            self._at_work.pop(case, None)
            self._together = tuple(each for each in self._together if each != case)
            if outcome.is_told or self._verbose:
                told = f"[{self._count()}] {self._name(case)}: {outcome.ending}{self._times()}"
                self._tell(told, at_once=self._total is not None)

    def grouped(self, cases: Sequence[Case]) -> None:
        """Tell of the cases, as none of them ends for a while."""
        with self._lock:
            self._together = tuple(cases)
            self.message(f"{len(cases)} cases are timed in turns and end together: {names_of_cases(cases)}")

    def doing(self, text: str) -> None:
        """Remember the text for as long as no case is at work."""
        with self._lock:
            self._doing = text
            if self._verbose:
                self.message(f"{text} …")

    def memory_read(self, case: Case, peak_bytes: int) -> None:
        """Note that the case waits for others."""
        self._note(case, "waits for its turn")

    def round_timed(self, case: Case, steps: int) -> None:
        """Note how many steps were timed."""
        self._note(case, f"{counted(steps, 'step')} timed")

    def measured(self, case: Case, outcome: Outcome) -> None:
        """Print the result of a case."""
        with self._lock:
            self._pace.measured(case)
            self._tell(f"measured: {self._name(case)}: {outcome.ending}; the search for its largest batch follows")
            self._at_work.pop(case, None)

    def searching(self, case: Case) -> None:
        """Note that the search starts."""
        with self._lock:
            self._pace.searching(case)
            self._at_work[case] = _AtWork(state="searches")
            if self._verbose:
                self.message(f"searches: {self._name(case)}")

    def tried(self, case: Case, batch_size: int, fits: bool) -> None:
        """Tell how the trial ended."""
        with self._lock:
            self._tell(f"{self._name(case)}: batch {batch_size} {verdict(fits)}{self._times()}")

    def noted(self, case: Case, text: str) -> None:
        """Write the text."""
        self._note(case, text)
        self.message(f"{self._name(case)}: {text}")

    def message(self, text: str) -> None:
        """Write the message, which is no progress, at once."""
        with self._lock:
            self._write(text)

    @contextmanager
    def ticking(self, seconds: float = _LOOK_SECONDS) -> Iterator[None]:
        """Inside, look now and then for what is to be told; in the end, tell what waits."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(seconds):
                self.tick()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._flush()

    def tick(self) -> None:
        """Tell what waits to be told, or what goes on if nothing was told for long."""
        with self._lock:
            now = time.monotonic()
            if self._pending is not None and now - self._told >= _LEAST_SECONDS:
                self._flush()
            elif now - self._spoke >= self._silence_seconds:
                self._write(self._going_on(now))

    def _note(self, case: CaseData, state: str) -> None:
        with self._lock:
            if case in self._at_work:
                self._at_work[case].state = state

    def _tell(self, text: str, *, at_once: bool = False) -> None:
        """Write a line of progress, at once or, if there was one just before, later."""
        if at_once or self._verbose or time.monotonic() - self._told >= _LEAST_SECONDS:
            self._pending = None
            self._told = time.monotonic()
            self._write(text)
        else:
            self._pending = text

    def _flush(self) -> None:
        with self._lock:
            text, self._pending = self._pending, None
            if text is not None:
                self._told = time.monotonic()
                self._write(text)

    def _going_on(self, now: float) -> str:
        """Return what goes on, and what is waited for."""
        cases = sorted(self._at_work.items(), key=lambda each: each[1].since)
        is_alone = self._total == 1 and len(cases) == 1
        told = [
            f"{self._name(case)}: {work.state or case.first_state} "
            f"({format_seconds(now - (self._began if is_alone else work.since))})"
            for case, work in cases[:_NAMED]
        ]
        if is_alone:
            return told[0]
        if not told or self._total is None:  # a search, whose cases say little of what it is after
            told = [self._doing if told else f"{self._doing} …", *told]
        if len(cases) > _NAMED:
            told.append(f"{len(cases) - _NAMED} more")
        if len(self._together) > 1:
            told.append(f"{len(self._together)} cases end together")
        if self._total is None:
            told.append(self._count())
        elif self._pace.ended:
            told.append(f"{self._pace.ended} of {self._total} done")
        return f"{'; '.join(told)}{self._times()}"

    def _name(self, case: CaseData) -> str:
        return self._names.get(case, case.title)

    def _count(self) -> str:
        return f"{self._pace.ended} done" if self._total is None else f"{self._pace.ended}/{self._total}"

    def _times(self) -> str:
        """Return how long all has taken and may still take, once that is worth a word."""
        spent = time.monotonic() - self._began
        if spent < WORTH_TELLING_SECONDS:
            return ""
        left = None if self._total is None else self._pace.seconds_left()
        about = f", about {format_seconds(left)} left" if left and left >= 1 else ""
        return f" (after {format_seconds(spent)}{about})"

    def _write(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._console.print(Text(plain(text)), soft_wrap=True)


def verdict(fits: bool) -> str:
    """Return whether a batch fits, in words."""
    return "fits" if fits else "does not fit"
