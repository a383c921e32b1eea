"""Measuring the cases of a plan, each in a process of its own: simulated ones side by side, timed ones by device."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import Generic, TypeVar

from actbench.experiments.experiment import RecordSink, Summary, keep, pending
from actbench.experiments.ranks.team import ALONE, Launched, Sessions
from actbench.experiments.recipes.sections import Planned
from actbench.experiments.runner.processes import ForkServer
from actbench.experiments.runner.progress import Progress
from actbench.experiments.runner.timinggroup import TimingGroup, exact_of, needs_search, timing_groups
from actbench.experiments.runner.trials import Trials
from actbench.results.machine import Gpu, available_memory_bytes, find_gpus, provenance
from actbench.results.measured import MeasuredRecord, Outcome
from actbench.results.records import Case, Machine, MeterName

BENCH = "actbench.measuring.bench"
PRELOAD = (
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.generation.utils",
    "actbench.workloads.huggingface",
    "actbench.workloads.torchvision",
)
"""What takes seconds to import and most models need.

It is imported before any memory is limited: some of it waits for ever where it meets a limit.
"""


def run(
    plan: Sequence[Planned[Case]],
    store: RecordSink[MeasuredRecord],
    *,
    recipe: str,
    command: str,
    jobs: int = 1,
    gpus: Sequence[str | None] = (None,),
    timeout_seconds: float | None = None,
    force: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
    bench: str = BENCH,
    preload: Sequence[str] = PRELOAD,
    launched: Launched = ALONE,
    printed: str | None = None,
) -> Summary:
    """Measure the cases of a plan that are not done, and store a record of each as soon as it ends.

    A case that runs out of memory, takes too long, raises or dies becomes a failed record, and the sweep goes on.
    Simulated cases come first, several at a time; of the others, one works at a time on each device. Killed at any
    moment, the sweep leaves no process behind and resumes when it is run again.

    Args:
        plan: Cases in the order of the table; one that stands twice is measured once.
        store: Where records go.
        recipe: Name of the recipe, for the records.
        command: What the user can type to have the same, for the records.
        jobs: How many simulated cases run at a time.
        gpus: Names in ``CUDA_VISIBLE_DEVICES`` of the GPUs, all of one kind, that measure side by side: cases that are
            timed against each other stay on one. None is what is visible here.
        timeout_seconds: Time that one case, and one trial of its largest batch, may work; None is without end.
        force: Whether to measure what is done as well.
        retry_failed: Whether to measure again what is done and failed.
        progress: Told what happens.
        bench: Module that measures a case; see :class:`actbench.experiments.runner.worker.Bench`.
        preload: Modules that cases need, imported once.
        launched: The processes that were launched together, of which this is the first, and how many a case needs.
        printed: The folder for what unchanged scripts print; None to keep only the last of it, for messages.

    Raises:
        MeasurementError: The processes cannot be started at all.
        StoreError: A record cannot be stored.
        KeyboardInterrupt: The user stopped the sweep; what ended before is stored, and no process is left.
    """
    progress = progress or Progress()
    todo = pending(plan, store, progress, jobs=jobs, force=force, retry_failed=retry_failed)
    if not todo:
        return Summary(skipped=len({entry.case for entry in plan}))
    origin = provenance(command)
    if launched.team is not None:
        launched.team.begin(bench, preload)
    with ForkServer(bench, preload) as server:
        measured = (lambda case: None) if force else partial(_measured, store)
        sweep = Sweep(
            server, origin["machine"], store.done, jobs, timeout_seconds, progress, gpus, launched, measured, printed
        )
        with closing(sweep.outcomes(todo)) as outcomes:
            return keep(outcomes, MeasuredRecord, plan, store, progress, recipe=recipe, origin=lambda case: origin)


def _measured(store: RecordSink[MeasuredRecord], case: Case) -> Outcome | None:
    """Return what came of a case in an interrupted sweep before the search for its largest batch."""
    record = store.find(case)
    return record.outcome if isinstance(record, MeasuredRecord) and record.awaits_search else None


@dataclass(frozen=True)
class Sweep:
    """Measures cases on this machine: simulated ones side by side, then timing groups one after the other on each GPU.

    ``gpus``, ``launched`` and ``printed`` are as in :func:`run`; ``measured`` returns what is known of a case of which
    the largest batch alone is to be found.
    """

    server: ForkServer
    here: Machine
    done: Callable[[Case], bool]
    jobs: int
    timeout_seconds: float | None
    progress: Progress
    gpus: Sequence[str | None] = (None,)
    launched: Launched = ALONE
    measured: Callable[[Case], Outcome | None] = lambda case: None
    printed: str | None = None

    def _sessions(self, gpu: str | None = None) -> Sessions:
        return Sessions(self.server, self.timeout_seconds, self.launched, gpu, self.progress, self.printed)

    def outcomes(self, cases: Sequence[Case]) -> Generator[tuple[Case, Outcome], None, None]:
        """Yield each case with its outcome as soon as it ends, and before its search without its largest batch."""
        misfits = {case: failure for case in cases if (failure := self.launched.misfit(case)) is not None}
        for case, failure in misfits.items():
            self.progress.started(case)
            yield case, failure
        yield from self._simulate([case for case in cases if case.meter == "simulated"])
        on_devices = [case for case in cases if case.meter != "simulated" and case not in misfits]
        before = {case: known for case in on_devices if (known := self.measured(case)) is not None}
        groups = timing_groups([case for case in on_devices if case not in before])
        if len(self.gpus) > 1:  # what runs on the CPU has nothing beside it
            on_gpus = [group for group in groups if group[0].meter == "cuda"]
            groups = [group for group in groups if group[0].meter != "cuda"]
            yield from side_by_side(self._measure, on_gpus, self.gpus, self.server.close)
        for group in groups:
            yield from self._measure(group, self.gpus[0])
        for case, outcome in before.items():
            yield case, self._with_largest_batch(case, outcome, self.gpus[0])

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
        with self._sessions().open(case) as session:
            session.tried = partial(self.progress.tried, case)
            return session.memory()

    def _measure(self, group: Sequence[Case], gpu: str | None) -> Iterator[tuple[Case, Outcome]]:
        memory_bytes = self._memory_bytes(group[0].meter)
        rounds = TimingGroup(self._sessions(gpu), memory_bytes or math.inf, self.progress)
        exact = exact_of(group[0])
        is_known = exact not in group and (self.done(exact) or self.measured(exact) is not None)
        searched: list[tuple[Case, Outcome]] = []
        for case, outcome in rounds.measure(group, exact if is_known else None):
            if needs_search(case, outcome):
                searched.append((case, outcome))
            yield case, outcome
        for case, outcome in searched:  # now that no other case is alive
            yield case, self._with_largest_batch(case, outcome, gpu)

    def _with_largest_batch(self, case: Case, outcome: Outcome, gpu: str | None) -> Outcome:
        memory = self._memory_bytes(case.meter)
        if memory is not None and case.meter == "cpu" and self.launched.spreads(case):
            memory //= self.launched.needed(case)  # which share the machine
        return Trials(self._sessions(gpu), memory, self.progress).add_largest_batch(case, outcome)

    def _memory_bytes(self, meter: MeterName) -> int | None:
        """Return the memory that a step may use now that no case is alive."""
        return self.here.gpu_memory_bytes if meter == "cuda" else available_memory_bytes()


GroupT = TypeVar("GroupT")
T = TypeVar("T")


def chosen_gpus(jobs: int | None, progress: Progress) -> tuple[str | None, ...]:
    """Return the names in ``CUDA_VISIBLE_DEVICES`` of the GPUs that measure: ``jobs`` of them, or else the first.

    Only GPUs of the first one's kind count, since speeds of others cannot be compared with its. Where there is one GPU
    or none, it is None: what is visible here.
    """
    found = find_gpus()
    if len(found) < 2 or found[0].uuid is None:
        return (None,)
    alike = [gpu.uuid for gpu in found if _kind(gpu) == _kind(found[0]) and gpu.uuid is not None]
    if jobs is not None and jobs > len(alike) and len(alike) < len(found):
        progress.message(
            f"{len(alike)} of {len(found)} GPUs measure, those that are {found[0].name}: speeds of different GPUs are "
            "not compared; CUDA_VISIBLE_DEVICES chooses others"
        )
    return tuple(alike[: jobs or 1])


def _kind(gpu: Gpu) -> tuple[str, int]:
    return gpu.name, gpu.memory_bytes


def side_by_side(
    work: Callable[[GroupT, str | None], Iterator[T]],
    groups: Sequence[GroupT],
    gpus: Sequence[str | None],
    stop: Callable[[], None],
) -> Generator[T, None, None]:
    """Yield what ``work(group, gpu)`` yields for each group, as it comes; a GPU does one group after the other.

    Where ``work`` raises, or whoever takes the results stops, ``stop`` is called: it makes all work that goes on raise.
    """
    queue = _Queue(work, groups)
    with ThreadPoolExecutor(len(gpus)) as pool:
        for gpu in gpus:
            pool.submit(queue.serve, gpu)
        try:
            yield from queue.results(len(gpus))
        except BaseException:
            queue.stopped.set()
            stop()
            raise


class _Queue(Generic[GroupT, T]):
    """Groups that wait for a GPU, and what came of others."""

    def __init__(self, work: Callable[[GroupT, str | None], Iterator[T]], groups: Sequence[GroupT]) -> None:
        self._work = work
        self._waiting: SimpleQueue[GroupT] = SimpleQueue()
        for group in groups:
            self._waiting.put(group)
        self._told: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
        self.stopped = Event()

    def serve(self, gpu: str | None) -> None:
        """Do groups on a GPU until none is left."""
        try:
            while not self.stopped.is_set():
                for found in self._work(self._waiting.get_nowait(), gpu):
                    self._told.put((found,))
        except Empty:
            self._told.put(None)
        except BaseException as error:
            self._told.put(error)

    def results(self, at_work: int) -> Iterator[T]:
        """Yield results until so many GPUs are done, and raise what one raised."""
        while at_work:
            told = self._told.get()
            if told is None:
                at_work -= 1
            elif isinstance(told, BaseException):
                raise told
            else:
                yield told[0]
