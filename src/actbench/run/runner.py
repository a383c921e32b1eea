"""The loop of a sweep: it sends unfinished cases to an executor and stores their outcomes as records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from actbench.model.measured import MeasuredRecord, Outcome
from actbench.model.meters import MeterName
from actbench.model.records import Case
from actbench.run.executor import BENCH, PRELOAD, Cases, Executor, Handle, Machines, Place, PlaceLostError, Told, Work
from actbench.run.experiment import RecordSink, Summary, keep, pending
from actbench.run.local import ThisMachine
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned
from actbench.run.timinggroup import timing_groups

_LOOK_SECONDS: Final = 1.0  # after which an executor may have other places


def run_plan(
    plan: Sequence[Planned[Case]],
    store: RecordSink[MeasuredRecord],
    *,
    recipe: str,
    command: str,
    jobs: int = 1,
    machines: Machines | None = None,
    timeout_seconds: float | None = None,
    force: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
    bench: str = BENCH,
    preload: Sequence[str] = PRELOAD,
    printed: str | None = None,
    needed: Callable[[Case], int] = lambda case: 1,
) -> Summary:
    """Measure the cases of a plan that are not done, and store a record of each as soon as it ends.

    A case that runs out of memory, takes too long, raises or dies becomes a failed record, and the sweep goes on.
    Simulated cases come first, several at a time; of the others, one works at a time on each device. Killed at any
    moment, the sweep leaves no process behind and resumes when it is run again.

    Args:
        plan: Cases in the order of the table; one that is given twice is measured once.
        store: Where records go.
        recipe: Name of the recipe, for the records.
        command: As of :class:`~actbench.run.executor.Work`; likewise ``jobs``, ``timeout_seconds``,
            ``bench``, ``preload``, ``printed`` and ``needed``.
        jobs: How many simulated cases run at a time.
        machines: Those that measure; this one unless given.
        timeout_seconds: Time that one case may work.
        force: Whether to measure what is done as well.
        retry_failed: Whether to measure again what is done and failed.
        progress: Told what happens.
        bench: Module that measures a case.
        preload: Modules that cases need.
        printed: The folder for what scripts print.
        needed: How many processes train together in a case.

    Raises:
        MeasurementError: The processes cannot be started at all, or a machine is gone.
        UsageError: The machines cannot be reached, or none has what a case needs.
        StoreError: A record cannot be stored.
        KeyboardInterrupt: The user stopped the sweep; what ended before is stored, and no process is left.
    """
    progress = progress or Progress()
    todo = pending(plan, store, progress, jobs=jobs, force=force, retry_failed=retry_failed)
    if not todo:
        return Summary(skipped=len({entry.case for entry in plan}))
    progress.doing("starting the processes that measure")
    work = Work(
        progress,
        command,
        cases=todo,
        jobs=jobs,
        timeout_seconds=timeout_seconds,
        bench=bench,
        preload=preload,
        printed=printed,
        done=store.done,
        measured=(lambda case: None) if force else partial(_measured, store),
        needed=needed,
    )
    origins: dict[Case, Mapping[str, Any]] = {}

    def found(told: Iterator[Told]) -> Iterator[tuple[Case, Outcome]]:
        for case, outcome, origins[case] in told:
            yield case, outcome

    with (machines or ThisMachine()).start(work) as executor, closing(outcomes(executor, work, todo)) as told:
        return keep(found(told), MeasuredRecord, plan, store, progress, recipe=recipe, origin=origins.pop)


def _measured(store: RecordSink[MeasuredRecord], case: Case) -> Outcome | None:
    """Return what came of a case in an interrupted sweep before the search for its largest batch."""
    record = store.find(case)
    return record.outcome if isinstance(record, MeasuredRecord) and record.awaits_search else None


def outcomes(
    executor: Executor,
    work: Work,
    cases: Sequence[Case],
    may_begin: Callable[[], bool] = lambda: True,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Generator[Told, None, None]:
    """Yield each case with its outcome as soon as it ends, and before its search without its largest batch.

    No case begins once ``may_begin()`` is false. Running cases are stopped, without an outcome, once ``may_go_on()`` is
    false. Closing the generator, and any error, stops all running cases.
    """
    told: SimpleQueue[Told | Handle] = SimpleQueue()
    at_work: dict[Handle, Place] = {}
    stopped: set[Handle] = set()
    try:
        for meter, units in _units(work, cases):
            waiting = deque(units)
            while True:
                while waiting and may_begin() and (place := _free(executor.places(meter), at_work)) is not None:
                    _begin(executor, waiting, place, told, at_work)
                if not at_work:
                    break
                if not may_go_on():
                    _stop(at_work, stopped)
                try:
                    news = told.get(timeout=_LOOK_SECONDS)
                except Empty:
                    continue
                if isinstance(news, Handle):
                    del at_work[news]
                    if news not in stopped:
                        news.result()
                else:
                    yield news
    except BaseException:
        _stop(at_work, stopped)
        raise


def _begin(
    executor: Executor,
    waiting: deque[Cases],
    place: Place,
    told: SimpleQueue[Told | Handle],
    at_work: dict[Handle, Place],
) -> None:
    """Begin the first of the waiting cases at a place, or none if the place is gone: others are left."""
    try:
        handle = executor.submit(waiting[0], place, told.put)
    except PlaceLostError:
        return
    waiting.popleft()
    at_work[handle] = place
    handle.future.add_done_callback(partial(_put, told, handle))


def _stop(at_work: Iterable[Handle], stopped: set[Handle]) -> None:
    """Stop what is at work, each once."""
    for handle in at_work:
        if handle not in stopped and not handle.future.done():
            stopped.add(handle)
            handle.stop()


def _put(told: SimpleQueue[Told | Handle], ended: Handle, _: object) -> None:
    told.put(ended)


def _free(places: Sequence[Place], at_work: Mapping[Handle, Place]) -> Place | None:
    taken = set(at_work.values())
    return next((place for place in places if place not in taken), None)


def _units(work: Work, cases: Sequence[Case]) -> Iterator[tuple[MeterName, Sequence[Cases]]]:
    """Yield what belongs together, by meter: what is timed has no simulated case beside it, and the CPU nothing."""
    yield "simulated", [(case,) for case in cases if case.meter == "simulated"]
    timed = [case for case in cases if case.meter != "simulated"]
    searched = [case for case in timed if work.measured(case) is not None]
    groups = timing_groups([case for case in timed if case not in searched])
    meters = sorted({case.meter for case in timed}, key=lambda meter: (meter != "cuda", meter))
    for meter in meters:
        yield meter, [tuple(group) for group in groups if group[0].meter == meter]
    for meter in meters:
        yield meter, [(case,) for case in searched if case.meter == meter]
