"""How long a fit simulates, and which parts of its search the time cut short."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from actbench.units import format_seconds

BUDGET_SECONDS: Final = 120.0
"""Seconds after which no simulation of a model starts, unless a user says it."""

LONG_BUDGET_SECONDS: Final = 600.0
"""The same for a script, each of whose simulations runs the script, and for questions, each of which has searches."""

_GRACE, _LEAST_GRACE = 0.25, 10.0
"""Share of the budget, and at least these seconds, that a running case may take after the time is over."""


class Budget:
    """The time in which simulations may start: all searches of one command share it, and each has a part of it.

    It lasts ``seconds`` from now on; None sets no limit.

    Attributes:
        cut_short: The searches in which some simulation could not start any more.
        is_stopped: Whether the user ended it.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.cut_short: list[str] = []
        self.is_stopped = False
        self._began = time.monotonic()
        self._until = math.inf if seconds is None else time.monotonic() + seconds
        self._search = "plans"

    @property
    def left_seconds(self) -> float:
        """Seconds until no simulation may start; infinite without a limit."""
        return 0.0 if self.is_stopped else max(0.0, self._until - time.monotonic())

    @property
    def passed(self) -> str:
        """How long the search is at work, and its deadline if there is one: ``2m 10s of 10m``."""
        until = f" of {format_seconds(self.seconds)}" if self.seconds is not None else ""
        return f"{format_seconds(time.monotonic() - self._began)}{until}"

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let the first Ctrl-C inside end the time, so that the best plan so far is told; a second one interrupts."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield
            return

        def stop(*_: object) -> None:
            signal.signal(signal.SIGINT, before)
            self.is_stopped = True

        signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def share(self, search: str, share: float = 1.0) -> Iterator[None]:
        """Give a search, named in the plural, a share of the time that is left; the rest is for what follows."""
        before = self._search, self._until
        self._search = search
        if self.left_seconds < math.inf:
            self._until -= (1 - share) * self.left_seconds
        try:
            yield
        finally:
            self._search, self._until = before

    def may_begin(self) -> bool:
        """Whether a simulation may start."""
        return self._is_within(0.0)

    def may_go_on(self) -> bool:
        """Whether simulations at work may go on: one that hangs would hold up the answer until its own timeout."""
        return self._is_within(max(_GRACE * (self.seconds or 0.0), _LEAST_GRACE))

    def _is_within(self, grace: float) -> bool:
        is_within = not self.is_stopped and time.monotonic() <= self._until + grace
        if not is_within and self._search not in self.cut_short:
            self.cut_short.append(self._search)
        return is_within

    @property
    def reason(self) -> str:
        """The sentence that comes before an answer from only some of the simulations; empty if all were made."""
        if not self.cut_short:
            return ""
        *others, last = self.cut_short
        searches = f"{', '.join(others)} and {last}" if others else last
        why = "by Ctrl-C" if self.is_stopped else f"after {self.seconds or 0:g} s (--budget)"
        return f"The search stopped {why}, before it had tried all {searches}; run the same command again to continue."
