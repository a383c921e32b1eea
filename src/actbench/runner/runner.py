"""Running a plan: each case in a process of its own, each outcome stored as soon as it is known, failures too."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from actbench.machine import available_memory_bytes, machine, versions
from actbench.records import Case, Machine, Measurement, MeterName, Outcome, Published, Record
from actbench.runner.cohort import Cohort, awaits_search, cohorts, exact_of
from actbench.runner.isolated import IsolatedSession
from actbench.runner.processes import ForkServer
from actbench.runner.progress import Progress, Silent
from actbench.runner.trials import Trials

BENCH = "actbench.bench"
PRELOAD = ("transformers.modeling_utils", "torchvision.models")
"""What takes seconds to import and most models need.

It is imported before any memory is limited: some of it waits for ever where it meets a limit.
"""


class Planned(Protocol):
    """A case to measure with the figures that were published for it."""

    @property
    def case(self) -> Case:
        """What to measure."""
        ...

    @property
    def label(self) -> str | None:
        """How tables call it, or None."""
        ...

    @property
    def published(self) -> tuple[Published, ...]:
        """What its record shows beside it."""
        ...


class Store(Protocol):
    """Where records are kept."""

    def done(self, key: str) -> bool:
        """Whether the case with this key needs no measuring.

        A failed case is done as well: its failure is a result, and only ``force`` and ``retry_failed`` try it again.
        The exception is ``unavailable``, where the machine lacked something that may have been installed since.
        """
        ...

    def failed(self, key: str) -> bool:
        """Whether the case with this key is done and failed."""
        ...

    def append(self, record: Record) -> None:
        """Keep a record for good."""
        ...


@dataclass(frozen=True)
class Summary:
    """How many cases of a plan were measured, failed, and were done before."""

    measured: int = 0
    failed: int = 0
    skipped: int = 0


def run(
    plan: Sequence[Planned],
    store: Store,
    *,
    recipe: str,
    command: str,
    jobs: int = 1,
    timeout_seconds: float | None = None,
    force: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
    bench: str = BENCH,
    preload: Sequence[str] = PRELOAD,
) -> Summary:
    """Measure the cases of a plan that are not done, and store a record of each as soon as it ends.

    A case that runs out of memory, takes too long, raises or dies becomes a failed record, and the sweep goes on.
    Simulated cases come first, several at a time; of the others, one works at a time. Killed at any moment, the
    sweep leaves no process behind and goes on where it was when it is run again.

    Args:
        plan: Cases in the order of the table; one that stands twice is measured once.
        store: Where records go.
        recipe: Name of the recipe, for the records.
        command: What the user can type to have the same, for the records.
        jobs: How many simulated cases run at a time.
        timeout_seconds: Time that one case, and one trial of its largest batch, may work; None is without end.
        force: Whether to measure what is done as well.
        retry_failed: Whether to measure again what is done and failed.
        progress: Told what happens.
        bench: Module that measures a case; see :class:`actbench.runner.worker.Bench`.
        preload: Modules that are imported once, before the first case, because cases need them.

    Raises:
        MeasurementError: The processes cannot be started at all.
        StoreError: A record cannot be stored.
        KeyboardInterrupt: The user stopped the sweep; what ended before is stored, and no process is left.
    """
    progress = progress or Silent()
    planned = {entry.case: entry for entry in plan}

    def is_done(key: str) -> bool:
        return not force and store.done(key) and not (retry_failed and store.failed(key))

    done = {case for case in planned if is_done(case.key())}
    todo = [case for case in planned if case not in done]
    for case in done:
        progress.skipped(case)
    summary = Summary(skipped=len(planned) - len(todo))
    progress.planned(todo, jobs)
    if not todo:
        return summary
    here, versions_here = machine(), versions()
    with ForkServer(bench, preload) as server:
        sweep = _Sweep(server, here, store.done, jobs, timeout_seconds, progress)
        with closing(sweep.outcomes(todo)) as outcomes:
            for case, outcome in outcomes:
                record = Record(
                    recipe=recipe,
                    case=case,
                    outcome=outcome,
                    machine=here,
                    versions=versions_here,
                    command=command,
                    recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
                    label=planned[case].label,
                    published=planned[case].published,
                )
                store.append(record)
                progress.finished(case, outcome)
                summary = _counted(summary, outcome)
    return summary


def _counted(summary: Summary, outcome: Outcome) -> Summary:
    if isinstance(outcome, Measurement):
        return replace(summary, measured=summary.measured + 1)
    return replace(summary, failed=summary.failed + 1)


@dataclass(frozen=True)
class _Sweep:
    server: ForkServer
    here: Machine
    done: Callable[[str], bool]
    jobs: int
    timeout_seconds: float | None
    progress: Progress

    def outcomes(self, cases: Sequence[Case]) -> Generator[tuple[Case, Outcome], None, None]:
        """Yield each case with its outcome as soon as that is known, in the order in which the cases end."""
        yield from self._simulate([case for case in cases if case.meter == "simulated"])
        for cohort in cohorts([case for case in cases if case.meter != "simulated"]):
            yield from self._measure(cohort)

    def _simulate(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = {pool.submit(self._simulate_one, case): case for case in cases}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:  # the user, or whoever stores the records, stops the sweep
                pool.shutdown(wait=False, cancel_futures=True)
                self.server.close()
                raise

    def _simulate_one(self, case: Case) -> Outcome:
        self.progress.started(case)
        with IsolatedSession(self.server, case, self.timeout_seconds) as session:
            return session.memory()

    def _measure(self, cohort: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
        memory_bytes = self._memory_bytes(cohort[0].meter)
        rounds = Cohort(self.server, memory_bytes or math.inf, self.timeout_seconds, self.progress)
        exact = exact_of(cohort[0])
        is_known = exact not in cohort and self.done(exact.key())
        for case, outcome in rounds.measure(cohort, exact if is_known else None):
            yield case, self._with_largest_batch(case, outcome) if awaits_search(case, outcome) else outcome

    def _with_largest_batch(self, case: Case, outcome: Outcome) -> Outcome:
        trials = Trials(self.server, self._memory_bytes(case.meter), self.timeout_seconds, self.progress)
        return trials.add_largest_batch(case, outcome)

    def _memory_bytes(self, meter: MeterName) -> int | None:
        """Return the memory that a step may use now that no case is alive, as the meter will find it."""
        return self.here.gpu_memory_bytes if meter == "cuda" else available_memory_bytes()
