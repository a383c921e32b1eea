"""Simulating the cases of a search, each stored as soon as it ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from actbench.machine import provenance
from actbench.model.data import LEFT_OUT, OutcomeData
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure
from actbench.report.store import Store
from actbench.run.executor import Machines, Told, Work
from actbench.run.local import ThisMachine
from actbench.run.progress import Progress
from actbench.run.runner import outcomes
from actbench.tools.fit.budgets import Budget
from actbench.tools.fit.counts import is_crash
from actbench.tools.fit.plan import Plan
from actbench.tools.fit.records import FitRecord

_REFUSALS = ("nothing-converted", "unsupported", "unavailable")

Origin = Mapping[str, Any]
MakeRecord = Callable[[Case, Plan, Outcome, Origin], FitRecord]
Simulator = Callable[[Sequence[Case], Callable[[], bool], Callable[[], bool]], Generator[Told, None, None]]
"""Simulates cases, several at a time, and yields each as it ends.

It leaves out cases that may not begin any more, as the first function says, or not go on, as the second says.
"""


class Simulations:
    """Gives outcomes of cases: from a results file, or from what simulates them.

    Attributes:
        simulated: How many were simulated, those of copies of the model not counted.
        copies: How many copies of the model were simulated or measured.
        taken: Cases that the results file had.
        crashed: Cases whose simulation crashed, with why.
    """

    def __init__(
        self,
        simulator: Simulator,
        store: Store[FitRecord],
        make_record: MakeRecord,
        progress: Progress,
        *,
        jobs: int,
        budget: Budget,
        planned: list[Case],
        told: Callable[[], None],
        command: str,
    ) -> None:
        self._simulator, self._store, self._make_record = simulator, store, make_record
        self._progress, self._jobs, self._budget = progress, jobs, budget
        self._planned, self._told, self._command = planned, told, command
        self.simulated = self.copies = 0
        self.taken: set[Case] = set()
        self.crashed: dict[Case, Failure] = {}

    def __call__(self, plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        """Yield each case with its outcome; leave out cases that cannot begin before time runs out."""
        todo = []
        for case in plans:
            record = self._store.find(case) if self._store.done(case) else None
            # what crashed in another run may not crash again
            if record is None or record.joined or (is_crash(record.outcome) and case not in self.crashed):
                todo.append(case)
                continue
            self.taken.add(case)
            known = {"machine": record.machine, "versions": record.versions, "command": record.command}
            mine = self._make_record(case, plans[case], record.outcome, known)
            # Another fit may have asked for something else, or for another model, of which this one was a copy.
            if not mine.of_copy and (record.of_copy or record.asked != mine.asked):
                self._store.append(mine.after(record))
            yield case, record.outcome
        if todo:
            self._progress.planned([*self._planned, *todo], self._jobs, more=True)
            self._planned += todo
            with closing(self._simulator(todo, self._budget.may_begin, self._budget.may_go_on)) as told:
                for case, outcome, origin in told:
                    record = self._make_record(case, plans[case], outcome, origin).after(self._store.find(case))
                    self._store.append(record)
                    self._progress.finished(case, _told(record))
                    if not (isinstance(outcome, Failure) and outcome.reason in _REFUSALS):  # before its step
                        self.simulated += not record.of_copy
                        self.copies += record.of_copy
                    if is_crash(outcome):
                        self.crashed[case] = outcome
                    yield case, outcome
                    self._told()

    def note(self, case: Case, plan: Plan, outcome: Measurement) -> None:
        """Store a step that was joined from traces, unless the results file has its simulation, or this very row."""
        known = self._store.find(case)
        record = self._make_record(case, plan, outcome, provenance(self._command)).after(known)
        record = record.model_copy(update={"joined": True})
        same = ("outcome", "asked", "training")
        if known is None or (known.joined and any(getattr(known, name) != getattr(record, name) for name in same)):
            self._store.append(record)


class _Refused(OutcomeData):
    """What progress tells of a choice that the model or the device refuses: why stands below the table."""

    @property
    def state(self) -> str:
        """That the choice is left out."""
        return LEFT_OUT

    @property
    def is_told(self) -> bool:
        """Whether progress has a line for it, unless it has one for each case."""
        return False


def _told(record: FitRecord) -> OutcomeData:
    """Return what progress tells of a simulation: whether it is over its limit only if that is the user's own limit."""
    outcome = record.outcome
    if isinstance(outcome, Failure):
        return _Refused() if outcome.reason in _REFUSALS else outcome
    is_users = record.case.memory_limit_bytes == record.asked.limit_bytes
    return outcome if is_users else outcome.model_copy(update={"over_limit_bytes": None})


@contextmanager
def simulator(
    machines: Machines | None,
    *,
    jobs: int,
    timeout_seconds: float | None,
    command: str,
    progress: Progress,
    preload: Sequence[str],
    bench: str,
) -> Iterator[Simulator]:
    """Hold the processes that simulate cases while plans are made: those of ``machines``, or of this machine.

    ``bench`` and ``preload`` are as of :class:`~actbench.run.executor.Work`.

    Raises:
        UsageError: The machines cannot be reached.
    """
    work = Work(progress, command, jobs=jobs, timeout_seconds=timeout_seconds, bench=bench, preload=preload)
    with (machines or ThisMachine()).start(work) as executor:
        yield partial(outcomes, executor, work)
