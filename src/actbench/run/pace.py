"""How fast the cases of an experiment end."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Hashable, Sequence

from actbench.model.data import CaseData


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
        """Note that the case ended; again, it changes nothing."""
        with self._lock:
            now = time.monotonic()
            if case in self._started or case not in self._seconds:
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
        return work / max(1.0, min(left, busy / (now - since)))


class Paces:
    """The paces of cases and of searches for largest batches; cases of one pace follow one another."""

    def __init__(self) -> None:
        self._measuring: dict[str, tuple[Pace, int]] = {}
        self._searching, self._searches = Pace(), 0
        self._ended: set[CaseData] = set()

    @property
    def ended(self) -> int:
        """How many cases ended, with their searches."""
        return len(self._ended)

    def planned(self, cases: Sequence[CaseData]) -> None:
        """Forget cases that are not among these; without any, begin anew."""
        self._ended &= set(cases)
        of: dict[str, list[CaseData]] = {kind: [] for kind in self._measuring}
        for case in cases:
            of.setdefault(case.pace, []).append(case)
        for kind, those in of.items():
            pace = self._pace(kind)
            pace.planned(those)
            self._measuring[kind] = pace, len(those)
        searched = [case for case in cases if case.is_searched]
        self._searching.planned(searched)
        self._searches = len(searched)

    def started(self, case: CaseData) -> None:
        """Note that the case starts, or starts afresh."""
        self._pace(case.pace).case_started(case)

    def measured(self, case: CaseData) -> None:
        """Note that nothing is left of the case but its search."""
        self._pace(case.pace).case_ended(case)

    def searching(self, case: CaseData) -> None:
        """Note that the search of a case starts."""
        self.measured(case)
        self._searching.case_started(case)

    def finished(self, case: CaseData) -> None:
        """Note that the case ended."""
        self._ended.add(case)
        if case.is_searched:
            self._searching.case_ended(case)
        else:
            self.measured(case)

    def seconds_left(self) -> float | None:
        """Return about how long the rest takes; None while none of a kind, or no search, has ended."""
        all_paces = [*self._measuring.values(), (self._searching, self._searches)]
        left = [pace.seconds_left(total) for pace, total in all_paces if total]
        return None if None in left or not left else sum(filter(None, left))

    def _pace(self, kind: str) -> Pace:
        return self._measuring.setdefault(kind, (Pace(), 0))[0]
