"""The memory of a case while it runs: samples of the bytes alive, and now and then a report of them.

What counts allocations asks once who listens (:func:`listening`), and calls :meth:`LiveReports.look` after each
operator: that takes the time of a clock. Nothing is counted for it, and nothing is told unless somebody listens.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

from actbench.model.live import HOLDERS, LiveMemory
from actbench.model.records import Phase

SAMPLE_SECONDS = 0.05
REPORT_SECONDS = 0.5


class LiveReports:
    """Tells of the memory of a case, at most twice a second and at the end of each step.

    Args:
        tell: Receives the reports, from any thread; one at a time.
        clock: Returns seconds.
    """

    def __init__(self, tell: Callable[[LiveMemory], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._samples: list[int] = []
        self._sampled_at = self._told_at = -REPORT_SECONDS
        self._peak_bytes = 0
        self._process = os.getpid()
        self._telling = Lock()
        self.follow()

    def follow(
        self,
        *,
        where: Callable[[], tuple[int | None, Phase | None]] = lambda: (None, None),
        limit: Callable[[], int | None] = lambda: None,
        label: Callable[[int], str] = lambda name: "",
    ) -> None:
        """Follow a run in this process from now on.

        Args:
            where: Returns the number of the step, and its part, that run.
            limit: Returns the bytes that may be used.
            label: Returns who holds a storage, from its name; empty if unknown.
        """
        self._where, self._limit, self._label = where, limit, label
        self._process = os.getpid()

    def look(self, live_bytes: int, peak_bytes: int, storages: Callable[[], Iterable[tuple[int, int]]]) -> None:
        """Take a sample if it is time for one, and report if it is time for that.

        Args:
            live_bytes: Bytes alive.
            peak_bytes: The most of them so far, or in this step.
            storages: Returns the names of all storages with their bytes.
        """
        now = self._clock()
        if now - self._sampled_at < SAMPLE_SECONDS:
            return
        self._sampled_at = now
        self._samples.append(live_bytes)
        self._peak_bytes = max(self._peak_bytes, peak_bytes, live_bytes)
        if now - self._told_at >= REPORT_SECONDS:
            self.report(live_bytes, peak_bytes, storages())

    def report(
        self, live_bytes: int, peak_bytes: int, storages: Iterable[tuple[int, int]] = (), *, step: int | None = None
    ) -> None:
        """Report now, of a ``step`` that has ended or of what runs; processes that a script starts report nothing.

        The other arguments are as those of :meth:`look`.
        """
        if os.getpid() != self._process or not self._telling.acquire(blocking=False):
            return
        try:
            self._told_at = self._clock()
            self._peak_bytes = max(self._peak_bytes, peak_bytes, live_bytes)
            samples, self._samples = self._samples, []
            running, phase = (step, None) if step is not None else self._where()
            held: Counter[str] = Counter()
            for name, amount in list(storages):  # of which another thread may make more
                if amount:
                    held[self._label(name)] += amount
            del held[""]
            self._tell(
                LiveMemory(
                    live_bytes=live_bytes,
                    peak_bytes=self._peak_bytes,
                    limit_bytes=self._limit(),
                    step=running,
                    phase=phase,
                    samples=tuple(samples) or (live_bytes,),
                    holders=tuple(held.most_common(HOLDERS)),
                )
            )
        finally:
            self._telling.release()


_listening: ContextVar[LiveReports | None] = ContextVar("_listening", default=None)


def listening() -> LiveReports | None:
    """Return what tells of the memory of the case that runs, if somebody listens."""
    return _listening.get()


@contextmanager
def report_to(tell: Callable[[LiveMemory], object] | None) -> Iterator[None]:
    """Report the memory of the case that runs in the block to ``tell``; None for no report, as in a trial."""
    token = _listening.set(None if tell is None else LiveReports(tell))
    try:
        yield
    finally:
        _listening.reset(token)
