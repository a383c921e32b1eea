"""Simulates the cases of a search in separate processes, several at a time, and stores each as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from actbench.experiments.runner.isolated import IsolatedSession
from actbench.experiments.runner.processes import ForkServer
from actbench.experiments.runner.progress import Progress
from actbench.experiments.runner.runner import BENCH, PRELOAD
from actbench.fitting.choices import Stack
from actbench.results.fits import FitRecord
from actbench.results.measured import Outcome
from actbench.results.records import Case
from actbench.results.store import Store

MakeRecord = Callable[[Case, Stack, Outcome], FitRecord]


class Simulations:
    """Gives outcomes of cases: from a results file, or from a process that simulates them.

    Attributes:
        simulated: How many were simulated.
        found: How many were in the file.
        over: Whether time ran out before all cases had begun.
    """

    def __init__(
        self,
        server: ForkServer,
        store: Store[FitRecord],
        make_record: MakeRecord,
        progress: Progress,
        *,
        jobs: int,
        timeout_seconds: float | None,
        budget_seconds: float | None,
    ) -> None:
        self._server, self._store, self._make_record, self._progress = server, store, make_record, progress
        self._jobs, self._timeout_seconds = jobs, timeout_seconds
        self._deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
        self._planned: list[Case] = []
        self.simulated = self.found = 0
        self.over = False

    def __call__(self, stacks: Mapping[Case, Stack]) -> Iterator[tuple[Case, Outcome]]:
        """Yield each case with its outcome; leave out cases that cannot begin before time runs out."""
        todo = []
        for case in stacks:
            record = self._store.find(case) if self._store.done(case) else None
            if record is None:
                todo.append(case)
            else:
                self.found += 1
                yield case, record.outcome
        if todo:
            self._progress.planned([*self._planned, *todo], self._jobs)
            self._planned += todo
            for case, outcome in self._simulate(todo):
                self._store.append(self._make_record(case, stacks[case], outcome))
                self._progress.finished(case, outcome)
                self.simulated += 1
                yield case, outcome

    def _simulate(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
        with ThreadPoolExecutor(self._jobs) as pool:
            futures = {pool.submit(self._simulate_one, case): case for case in cases}
            try:
                for future in as_completed(futures):
                    outcome = future.result()
                    if outcome is not None:
                        yield futures[future], outcome
            except BaseException:  # Ctrl-C, or an error while records are stored
                pool.shutdown(wait=False, cancel_futures=True)
                self._server.close()
                raise

    def _simulate_one(self, case: Case) -> Outcome | None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.over = True
            return None
        self._progress.started(case)
        with IsolatedSession(self._server, case, self._timeout_seconds) as session:
            return session.memory()


@contextmanager
def simulations(
    store: Store[FitRecord], make_record: MakeRecord, progress: Progress, **settings: Any
) -> Iterator[Simulations]:
    """Keep the process that forks the cases for the length of a search."""
    with ForkServer(BENCH, PRELOAD) as server:
        yield Simulations(server, store, make_record, progress, **settings)
