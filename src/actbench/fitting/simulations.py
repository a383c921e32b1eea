"""Simulating the cases of a search, here or on a cluster, each stored as soon as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from actbench.experiments.cluster.cases import CaseWork, ClusterCases, connected
from actbench.experiments.cluster.cluster import Cluster
from actbench.experiments.runner.isolated import IsolatedSession
from actbench.experiments.runner.processes import ForkServer
from actbench.experiments.runner.progress import Progress
from actbench.experiments.runner.runner import BENCH, PRELOAD
from actbench.fitting.choices import Stack
from actbench.results.fits import FitRecord
from actbench.results.machine import provenance
from actbench.results.measured import Outcome
from actbench.results.records import Case
from actbench.results.store import Store

Origin = Mapping[str, Any]
MakeRecord = Callable[[Case, Stack, Outcome, Origin], FitRecord]
Told = tuple[Case, Outcome, Origin]
"""A case, what came of it, and machine, versions and command for its record."""


Simulator = Callable[[Sequence[Case], Callable[[], bool]], Generator[Told, None, None]]
"""Simulates cases, several at a time, and yields each as it ends; leaves out those that may not begin any more."""


@dataclass(frozen=True)
class ProcessesHere:
    """Simulates in processes of this machine, ``jobs`` at a time."""

    server: ForkServer
    origin: Origin
    jobs: int
    timeout_seconds: float | None
    progress: Progress

    def outcomes(self, cases: Sequence[Case], may_begin: Callable[[], bool]) -> Generator[Told, None, None]:
        """Yield each case as it ends."""
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = {pool.submit(self._outcome, case, may_begin): case for case in cases}
            try:
                for future in as_completed(futures):
                    outcome = future.result()
                    if outcome is not None:
                        yield futures[future], outcome, self.origin
            except BaseException:  # the user, or whoever stores the records, stops the fit
                pool.shutdown(wait=False, cancel_futures=True)
                self.server.close()
                raise

    def _outcome(self, case: Case, may_begin: Callable[[], bool]) -> Outcome | None:
        if not may_begin():
            return None
        self.progress.started(case)
        with IsolatedSession(self.server, case, self.timeout_seconds) as session:
            session.said = partial(self.progress.said, case)
            return session.memory()


def _on_nodes(nodes: ClusterCases, cases: Sequence[Case], may_begin: Callable[[], bool]) -> Generator[Told, None, None]:
    with closing(nodes.outcomes(cases, may_begin)) as found:
        for case, outcome in found:
            yield case, outcome, nodes.origins.pop(case)


class Simulations:
    """Gives outcomes of cases: from a results file, or from what simulates them.

    Attributes:
        simulated: How many were simulated, those of copies of the model not counted.
        over: Whether time ran out before all cases had begun.
    """

    def __init__(
        self,
        simulator: Simulator,
        store: Store[FitRecord],
        make_record: MakeRecord,
        progress: Progress,
        *,
        jobs: int,
        budget_seconds: float | None,
    ) -> None:
        self._simulator, self._store, self._make_record = simulator, store, make_record
        self._progress, self._jobs = progress, jobs
        self._deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
        self._planned: list[Case] = []
        self.simulated = 0
        self.over = False

    def __call__(self, stacks: Mapping[Case, Stack]) -> Iterator[tuple[Case, Outcome]]:
        """Yield each case with its outcome; leave out cases that cannot begin before time runs out."""
        todo = []
        for case in stacks:
            record = self._store.find(case) if self._store.done(case) else None
            if record is None:
                todo.append(case)
                continue
            known = {"machine": record.machine, "versions": record.versions, "command": record.command}
            mine = self._make_record(case, stacks[case], record.outcome, known)
            # Another fit may have asked for something else, or for another model, of which this one was a copy.
            if not mine.of_copy and (record.of_copy or record.asked != mine.asked):
                self._store.append(mine)
            yield case, record.outcome
        if todo:
            self._progress.planned([*self._planned, *todo], self._jobs, more=True)
            self._planned += todo
            with closing(self._simulator(todo, self._in_time)) as told:
                for case, outcome, origin in told:
                    record = self._make_record(case, stacks[case], outcome, origin)
                    self._store.append(record)
                    self._progress.finished(case, outcome)
                    self.simulated += not record.of_copy
                    yield case, outcome

    def _in_time(self) -> bool:
        self.over = self.over or (self._deadline is not None and time.monotonic() > self._deadline)
        return not self.over


@contextmanager
def simulator(
    cluster: Cluster | None,
    *,
    jobs: int,
    timeout_seconds: float | None,
    command: str,
    progress: Progress,
    libraries: Iterable[str] = (),
) -> Iterator[Simulator]:
    """Hold what simulates cases for as long as a search runs: nodes of a cluster, or processes of this machine.

    ``libraries`` are imported once, if they can be, and not in the process of each case.

    Raises:
        UsageError: The cluster cannot be reached.
    """
    preload = (*PRELOAD, *sorted(libraries))
    if cluster is None:
        with ForkServer(BENCH, preload) as server:
            yield ProcessesHere(server, provenance(command), jobs, timeout_seconds, progress).outcomes
    else:
        work = CaseWork(progress, timeout_seconds, bench=BENCH, preload=preload, is_ahead=False)
        with connected(cluster, command, work) as nodes:
            yield partial(_on_nodes, nodes)
