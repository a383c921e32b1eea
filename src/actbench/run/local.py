"""The executor of this machine: simulated cases side by side, timing groups one after the other on each GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Self

from actbench.errors import MeasurementError
from actbench.machine import Gpu, available_memory_bytes, find_gpus, provenance
from actbench.model.measured import Outcome
from actbench.model.meters import MeterName
from actbench.model.records import Case, Failure
from actbench.run.executor import Cases, Handle, Place, Told, Work
from actbench.run.isolated import CaseSession, IsolatedSession
from actbench.run.processes import ForkServer
from actbench.run.progress import Progress
from actbench.run.timinggroup import TimingGroup, exact_of, needs_search
from actbench.run.trials import Trials


class StoppedError(MeasurementError):
    """Raised in the thread of cases that were stopped."""


class LocalExecutor:
    """Starts each case in a process of its own on this machine.

    Args:
        work: What the cases have in common.
        gpus: Names in ``CUDA_VISIBLE_DEVICES`` of the GPUs, all of one kind, that measure side by side. None is what is
            visible here.
        origin: The provenance fields of records; asked for unless given.
        server: Forks the processes; started unless given, and then closed with the executor.

    Raises:
        MeasurementError: The processes cannot be started at all.
    """

    size = 1
    """How many processes there are for one case."""

    def __init__(
        self,
        work: Work,
        gpus: Sequence[str | None] = (None,),
        *,
        origin: Mapping[str, Any] | None = None,
        server: ForkServer | None = None,
    ) -> None:
        self.work = work
        self.origin = provenance(work.command) if origin is None else origin
        self._gpus = gpus
        self._held = ExitStack()
        # Threads end once a server of our own is closed, which makes all that they wait for raise; with another, once
        # their cases are stopped.
        self._pool = self._held.enter_context(ThreadPoolExecutor(max(work.jobs, len(gpus))))
        self.server = server or self._held.enter_context(ForkServer(work.bench))
        self.server.ready(work.modules, work.after_first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def places(self, meter: MeterName) -> Sequence[Place]:
        """Return a place for each job or each GPU; the CPU has one place and measures one case at a time."""
        if meter == "simulated":
            return [Place(number=number) for number in range(self.work.jobs)]
        return [Place(gpu) for gpu in (self._gpus if meter == "cuda" else self._gpus[:1])]

    def submit(self, cases: Cases, on: Place, tell: Callable[[Told], object]) -> Handle:
        """Begin to measure cases; see :class:`~actbench.run.executor.Executor`."""
        unit = _Unit(self, cases, on.name, tell)
        return Handle(self._pool.submit(unit.measure), unit.stop)

    def open(self, case: Case, gpu: str | None, *, is_trial: bool) -> CaseSession:
        """Start what measures a case; a MeasurementError if the fork server is gone."""
        is_shown = case.script is not None and case.scheme == "exact" and not is_trial
        printed = self.work.printed if is_shown else None
        return IsolatedSession(
            self.server,
            case,
            self.work.timeout_seconds,
            is_trial=is_trial,
            gpu=gpu,
            printed=printed,
            is_live=self.work.progress.is_live and not is_trial,
        )

    def spreads(self, case: Case) -> bool:
        """Whether several processes measure a case; a simulation of several cards needs only one."""
        return case.meter != "simulated" and self.work.needed(case) > 1

    def memory_bytes(self, meter: MeterName) -> int | None:
        """Return the memory that a step may use now that no case is alive."""
        gpu: int | None = self.origin["machine"].gpu_memory_bytes
        return gpu if meter == "cuda" else available_memory_bytes()


def misfit(case: Case, wanted: int, size: int) -> Failure | None:
    """Return why a case cannot be measured: it needs more than ``size`` processes; None where it can."""
    if case.meter == "simulated" or wanted <= size:
        return None
    found = "one was started" if size == 1 else f"{size} were launched"
    return Failure(
        reason="unavailable",
        message=f"{case.scheme} trains in {wanted} processes, and {found}: start 'torchrun --nproc-per-node "
        f"{wanted} -m actbench …', or take --meter simulated, which needs one",
    )


class _Unit:
    """Cases that belong together, on their place."""

    def __init__(self, executor: LocalExecutor, cases: Cases, gpu: str | None, tell: Callable[[Told], object]) -> None:
        self._executor, self._cases, self._gpu, self._tell = executor, cases, gpu, tell
        self._progress = executor.work.progress
        self._lock = Lock()
        self._sessions: list[CaseSession] = []
        self._is_stopped = False

    def measure(self) -> None:
        """Measure the cases, and tell each as soon as it ends; a StoppedError once they are stopped."""
        first, work = self._cases[0], self._executor.work
        if first.meter == "simulated":
            self._progress.started(first)
            with self.open(first) as session:
                session.tried = partial(self._progress.tried, first)
                outcome: Outcome = session.memory()
            self._say(first, outcome)
            return
        group = self._fitting()
        if group and len(self._cases) == 1 and (known := work.measured(first)) is not None:
            self._say(first, self._with_largest_batch(first, known))
        elif group:
            self._measure_in_turns(group)

    def _fitting(self) -> Sequence[Case]:
        """Return the cases for which there are enough processes, and tell of the others that they fail."""
        work, fitting = self._executor.work, []
        for case in self._cases:
            failure = misfit(case, work.needed(case), self._executor.size)
            if failure is None:
                fitting.append(case)
            else:
                self._progress.started(case)
                self._say(case, failure)
        return fitting

    def _measure_in_turns(self, group: Sequence[Case]) -> None:
        work = self._executor.work
        exact = exact_of(group[0])
        is_known = exact not in group and (work.done(exact) or work.measured(exact) is not None)
        memory_bytes = self._executor.memory_bytes(group[0].meter)
        rounds = TimingGroup(self.open, memory_bytes or math.inf, self._progress)
        searched: list[tuple[Case, Outcome]] = []
        for case, outcome in rounds.measure(group, exact if is_known else None):
            if needs_search(case, outcome):
                searched.append((case, outcome))
            self._say(case, outcome)
        for case, outcome in searched:  # now that no other case is alive
            self._say(case, self._with_largest_batch(case, outcome))

    def _with_largest_batch(self, case: Case, outcome: Outcome) -> Outcome:
        executor = self._executor
        memory = executor.memory_bytes(case.meter)
        if memory is not None and case.meter == "cpu" and executor.spreads(case):
            memory //= executor.work.needed(case)  # which share the machine
        return Trials(self.open, memory, self._progress).add_largest_batch(case, outcome)

    def open(self, case: Case, *, is_trial: bool = False) -> CaseSession:
        """Start what measures a case, unless the work was stopped."""
        session = self._executor.open(case, self._gpu, is_trial=is_trial)
        session.note = partial(self._progress.noted, case)
        session.reported = partial(self._progress.reported, case)
        with self._lock:
            self._sessions.append(session)
            if self._is_stopped:
                session.interrupt()
        return session

    def stop(self) -> None:
        """Kill the processes of the cases; no other begins."""
        with self._lock:
            self._is_stopped = True
            for session in self._sessions:
                session.interrupt()

    def _say(self, case: Case, outcome: Outcome) -> None:
        if self._is_stopped:
            raise StoppedError(f"{case.name} was stopped")
        self._tell((case, outcome, self._executor.origin))


@dataclass(frozen=True)
class ThisMachine:
    """This machine; ``gpus`` and ``server`` are as of :class:`LocalExecutor`."""

    gpus: Sequence[str | None] = (None,)
    elsewhere: bool = False
    server: ForkServer | None = None

    def check(self, cases: Sequence[Case], needed: Callable[[Case], int]) -> None:
        """Refuse nothing: a case that needs other processes is a row that says so."""

    def start(self, work: Work) -> LocalExecutor:
        """Return its executor."""
        return LocalExecutor(work, self.gpus, server=self.server)


def chosen_gpus(jobs: int | None, progress: Progress) -> tuple[str | None, ...]:
    """Return the names in ``CUDA_VISIBLE_DEVICES`` of the GPUs that measure: ``jobs`` of them, or else the first.

    Only GPUs of the first one's kind count, since speeds of other kinds cannot be compared. Where there is one GPU
    or none, it is None: what is visible here.
    """
    found = find_gpus()
    if len(found) < 2 or found[0].uuid is None:
        return (None,)
    same_kind = [gpu.uuid for gpu in found if _kind(gpu) == _kind(found[0]) and gpu.uuid is not None]
    if jobs is not None and jobs > len(same_kind) and len(same_kind) < len(found):
        progress.message(
            f"{len(same_kind)} of {len(found)} GPUs measure, those that are {found[0].name}: speeds of different "
            "GPUs are not compared; CUDA_VISIBLE_DEVICES chooses others"
        )
    return tuple(same_kind[: jobs or 1])


def _kind(gpu: Gpu) -> tuple[str, int]:
    return gpu.name, gpu.memory_bytes
