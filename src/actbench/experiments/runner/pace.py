"""How fast the cases of an experiment end."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Hashable


class Pace:
    """Counts cases that ended, and estimates how long the others take; several threads may tell it of their cases.

    The time before the first case starts is no part of it: processes are started, and modules imported, only once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._started: dict[Hashable, float] = {}
        self._seconds: dict[Hashable, float] = {}

    @property
    def ended(self) -> int:
        """How many cases ended."""
        return len(self._seconds)

    def planned(self, cases: Collection[Hashable]) -> None:
        """Forget cases that are not among these; without any, begin anew."""
        known = set(cases)
        with self._lock:
            self._started = {case: start for case, start in self._started.items() if case in known}
            self._seconds = {case: seconds for case, seconds in self._seconds.items() if case in known}
            if not self._started and not self._seconds:
                self._since = None

    def case_started(self, case: Hashable) -> None:
        """Note that the case starts, or starts afresh."""
        with self._lock:
            self._started[case] = now = time.monotonic()
            self._since = now if self._since is None else self._since

    def case_ended(self, case: Hashable) -> None:
        """Note that the case ended."""
        with self._lock:
            now = time.monotonic()
            self._seconds[case] = now - self._started.pop(case, now)

    def seconds_left(self, total: int) -> float | None:
        """Return about how long the rest of ``total`` cases takes; None if nothing is known of their time.

        Each takes the mean of those that ended, and as many work side by side as did so far.
        """
        with self._lock:
            now = time.monotonic()
            seconds, at_work = list(self._seconds.values()), [now - start for start in self._started.values()]
            since = self._since
        left, busy = total - len(seconds), sum(seconds) + sum(at_work)
        if since is None or not seconds or busy <= 0:
            return None
        if left <= 0:
            return 0.0
        mean = sum(seconds) / len(seconds)
        work = mean * max(0, left - len(at_work)) + sum(max(0.0, mean - spent) for spent in at_work)
        return work / min(left, busy / (now - since))
