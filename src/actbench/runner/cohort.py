"""Cases that are compared with each other, measured one at a time and timed in rounds, so that drift hits all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from actbench.records import Case, Failure, Measurement, Outcome
from actbench.runner.isolated import IsolatedSession
from actbench.runner.processes import ForkServer
from actbench.runner.progress import Progress

MEMORY_SHARE = 0.7
"""Share of the memory that the peaks of cases kept alive together may add up to."""

_ROUNDS = 5


def cohorts(cases: Sequence[Case]) -> list[list[Case]]:
    """Group cases that differ in nothing but the scheme, in order of first appearance."""
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.model_copy(update={"scheme": "exact"}), []).append(case)
    return list(groups.values())


@dataclass
class _Member:
    """A case that has read its memory and waits in its process for its turns to be timed."""

    case: Case
    session: IsolatedSession
    outcome: Measurement | Failure
    step_seconds: list[float] = field(default_factory=list)
    has_clock: bool = True

    @property
    def held_bytes(self) -> int:
        """Memory that the case may come to hold in a turn; nothing once it has failed and its process has ended."""
        if isinstance(self.outcome, Failure):
            return 0
        return max(self.outcome.peak_bytes, self.outcome.reserved_bytes or 0)

    @property
    def wants_turn(self) -> bool:
        enough = len(self.step_seconds) >= self.case.min_steps and sum(self.step_seconds) >= self.case.min_seconds
        return self.has_clock and isinstance(self.outcome, Measurement) and not enough

    def take_turn(self) -> None:
        """Time one round."""
        timed = self.session.time(self._steps())
        if isinstance(timed, Failure):
            self.outcome = timed
        elif timed is None:
            self.has_clock = False
        else:
            self.step_seconds.extend(timed)

    def result(self) -> Outcome:
        """Return the outcome with the seconds of all rounds."""
        if isinstance(self.outcome, Failure) or not self.has_clock:
            return self.outcome
        return self.outcome.model_copy(update={"step_seconds": tuple(self.step_seconds)})

    def _steps(self) -> int:
        steps = math.ceil(self.case.min_steps / _ROUNDS)
        if self.step_seconds:
            one = max(statistics.median(self.step_seconds), 1e-6)
            steps = max(steps, math.ceil(self.case.min_seconds / _ROUNDS / one))
        return steps


@dataclass(frozen=True)
class Cohort:
    """Measures cases that are compared with each other, on a device that nothing else uses meanwhile.

    Attributes:
        server: Where the processes of the cases are forked.
        memory_bytes: Memory of the device.
        timeout_seconds: Time that each case may work.
        progress: Told what happens.
    """

    server: ForkServer
    memory_bytes: float
    timeout_seconds: float | None
    progress: Progress

    def measure(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Measure cases that differ in nothing but the scheme.

        Each reads its memory in turn and then waits while the next does; when all have, they are timed in rounds. A
        case whose peak is too much beside those that wait, or that may have failed for want of room beside them, is
        put off: it starts afresh when they have ended.

        Yields:
            Each case with its outcome.
        """
        waiting = list(cases)
        while waiting:
            with ExitStack() as held:
                group, waiting = self._gather(waiting, held)
                self._time_in_rounds(group)
            yield from [(member.case, member.result()) for member in group]

    def _gather(self, cases: Sequence[Case], held: ExitStack) -> tuple[list[_Member], list[Case]]:
        """Read the memory of each case; return those that can be alive together and those put off."""
        group: list[_Member] = []
        put_off: list[Case] = []
        for case in cases:
            member = self._begin(case, held)
            if self._crowded(member, beside_bytes=sum(other.held_bytes for other in group)):
                member.session.close()
                put_off.append(case)
            else:
                group.append(member)
        return group, put_off

    def _begin(self, case: Case, held: ExitStack) -> _Member:
        self.progress.started(case)
        session = held.enter_context(IsolatedSession(self.server, case, self.timeout_seconds))
        outcome = session.memory()
        if isinstance(outcome, Measurement):
            self.progress.memory_read(case, outcome.peak_bytes)
        return _Member(case, session, outcome)

    def _crowded(self, member: _Member, beside_bytes: int) -> bool:
        if beside_bytes == 0:
            return False
        if isinstance(member.outcome, Failure):  # where its peak is known the step ran, and needs more than its limit
            refused = member.outcome.reason == "out-of-memory" and member.outcome.peak_bytes is None
            return refused or member.session.died
        return beside_bytes + member.held_bytes > MEMORY_SHARE * self.memory_bytes

    def _time_in_rounds(self, group: Sequence[_Member]) -> None:
        while turns := [member for member in group if member.wants_turn]:
            for member in turns:
                member.take_turn()
                self.progress.round_timed(member.case, len(member.step_seconds))
