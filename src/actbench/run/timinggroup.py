"""Timing groups: cases that are compared, measured one at a time and timed in rounds, so that drift hits all."""

from __future__ import annotations

import math
import statistics
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure
from actbench.run.isolated import CaseSession, Open
from actbench.run.progress import Progress

_ROUNDS = 5


PROCESS_BYTES = 2**29
"""What a process takes besides its step: torch and other libraries in host memory, or a context on a GPU. Seventy that
waited took all of 23 GiB, with steps of 20 to 100 MiB."""


def needed_bytes(outcome: Outcome) -> int:
    """Return the memory that a case may need in a turn, with its processes'; nothing once it has failed.

    Ranks on GPUs have one each; those on a CPU, which reserves nothing, share its memory.
    """
    if isinstance(outcome, Failure):
        return 0
    if outcome.reserved_bytes is None and outcome.rank_peak_bytes:
        return sum(outcome.rank_peak_bytes) + len(outcome.rank_peak_bytes) * PROCESS_BYTES
    return max(outcome.peak_bytes, outcome.reserved_bytes or 0) + PROCESS_BYTES


@dataclass(eq=False)
class GroupMember:
    """A case in its process, with what it measured so far, or how it failed."""

    case: Case
    session: CaseSession
    outcome: Measurement | Failure
    step_seconds: list[float] = field(default_factory=list)
    has_clock: bool = True

    @property
    def wants_turn(self) -> bool:
        """Whether more of its steps must be timed."""
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

    def result(self, timing_round: str, reference: GroupMember | None) -> Outcome:
        """Return the outcome with the seconds of all rounds.

        ``reference`` is the exact model that was interleaved with it, where that has no record of its own in this
        round.
        """
        if isinstance(self.outcome, Failure) or not self.has_clock:
            return self.outcome
        seconds = {"step_seconds": tuple(self.step_seconds), "timing_round": timing_round}
        if reference is not None and isinstance(reference.outcome, Measurement):
            seconds["exact_step_seconds"] = tuple(reference.step_seconds)
        return self.outcome.model_copy(update=seconds)

    def _steps(self) -> int:
        steps = math.ceil(self.case.min_steps / _ROUNDS)
        if self.step_seconds:
            one = max(statistics.median(self.step_seconds), 1e-6)
            steps = max(steps, math.ceil(self.case.min_seconds / _ROUNDS / one))
        return steps


MEMORY_SHARE = 0.7
"""Share of the memory that the peaks of cases kept alive together may add up to."""


def exact_of(case: Case) -> Case:
    """Return the case that a case's speed is compared with."""
    return case.model_copy(update={"scheme": "exact"})


def timing_groups(cases: Sequence[Case]) -> list[list[Case]]:
    """Group cases that differ in the scheme only, in order of first appearance, the exact model first."""
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(exact_of(case), []).append(case)
    return [sorted(group, key=lambda case: case.scheme != "exact") for group in groups.values()]


def needs_search(case: Case, outcome: Outcome) -> bool:
    """Whether the largest batch is yet to be found, which needs the device free of other cases."""
    searchable = isinstance(outcome, Measurement) or outcome.reason == "out-of-memory"
    return case.find_largest_batch and searchable


@dataclass
class _Turns:
    """Cases that are alive together and take turns.

    Attributes:
        name: Tells this round from all others, of other sweeps too.
        members: Those whose outcome is still to come.
        put_off: Cases that found no room.
        reference: The exact model where it is timed again only for the others.
        alive_bytes: Memory that all of it may come to need.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    members: list[GroupMember] = field(default_factory=list)
    put_off: list[Case] = field(default_factory=list)
    reference: GroupMember | None = None
    alive_bytes: int = 0

    def waiting(self) -> list[GroupMember]:
        """Return the members that need a turn, the exact model first."""
        if not self.members:
            return []
        everyone = self.members if self.reference is None else [self.reference, *self.members]
        return [member for member in everyone if member.wants_turn]

    def pop_finished(self) -> list[tuple[Case, Outcome]]:
        """Take out the members that need no more turns; those compared with the exact model wait for it."""
        exact = self.reference or next((member for member in self.members if member.case.scheme == "exact"), None)
        if exact is not None and exact.wants_turn:
            finished = [member for member in self.members if isinstance(member.outcome, Failure)]
        else:
            finished = [member for member in self.members if not member.wants_turn]
        self.members = [member for member in self.members if member not in finished]
        return [(member.case, member.result(self.name, self.reference)) for member in finished]


@dataclass(frozen=True)
class _ExactModel:
    """The exact model, when it was measured before, with the memory it is known to need (0: unknown)."""

    case: Case
    needed_bytes: int = 0


@dataclass(frozen=True)
class TimingGroup:
    """Measures cases that are compared, on a device of ``memory_bytes`` that nothing else uses meanwhile."""

    open: Open
    memory_bytes: float
    progress: Progress

    def measure(self, cases: Sequence[Case], exact: Case | None = None) -> Iterator[tuple[Case, Outcome]]:
        """Measure cases that differ in the scheme only, and yield each with its outcome.

        Each reads its memory in turn and then waits while the next does; then all are timed in rounds. A case whose
        peak does not fit together with those that wait, or that may have failed for lack of room, is put off: it starts
        afresh when they have ended. ``exact`` is the exact model, if it has a record but is not among the cases: it is
        timed again with them if there is room, because only interleaved steps can be compared.
        """
        known, waiting = None if exact is None else _ExactModel(exact), list(cases)
        if len(waiting) > 1:
            self.progress.grouped(waiting)
        while waiting:
            turns = _Turns()
            with ExitStack() as held:
                for case, outcome in self._outcomes(waiting, turns, known, held):
                    if case.scheme == "exact" and isinstance(outcome, Measurement):
                        known = _ExactModel(case, needed_bytes(outcome))
                    yield case, outcome
            waiting = turns.put_off

    def _outcomes(
        self, cases: Sequence[Case], turns: _Turns, known: _ExactModel | None, held: ExitStack
    ) -> Iterator[tuple[Case, Outcome]]:
        for case in cases:
            self.progress.started(case)
            member = self._begin(case, held)
            if isinstance(member.outcome, Measurement):
                self.progress.memory_read(case, member.outcome.peak_bytes)
            if self._crowded(member, turns.alive_bytes):
                member.session.close()
                turns.put_off.append(case)
            elif isinstance(member.outcome, Failure):
                yield case, member.outcome
            else:
                turns.members.append(member)
                turns.alive_bytes += needed_bytes(member.outcome)
                if known is not None:
                    self._add_reference(known, turns, held)
                    known = None
        while waiting := turns.waiting():
            for member in waiting:
                member.take_turn()
                if member is not turns.reference:
                    self.progress.round_timed(member.case, len(member.step_seconds))
                yield from turns.pop_finished()

    def _begin(self, case: Case, held: ExitStack) -> GroupMember:
        session = held.enter_context(self.open(case))
        return GroupMember(case, session, session.memory())

    def _add_reference(self, known: _ExactModel, turns: _Turns, held: ExitStack) -> None:
        """Let the exact model take turns with the group, if it still can."""
        if turns.alive_bytes + known.needed_bytes <= MEMORY_SHARE * self.memory_bytes:
            member = self._begin(known.case, held)
            if isinstance(member.outcome, Measurement) and not self._crowded(member, turns.alive_bytes):
                turns.reference = member
                turns.alive_bytes += needed_bytes(member.outcome)
                return
            member.session.close()
        beside = turns.members[0].case
        self.progress.message(
            f"{beside.model} {beside.scheme}, batch {beside.batch_size}: exact, measured before, cannot be timed again"
            " together with it, so its speed stays empty"
        )

    def _crowded(self, member: GroupMember, beside_bytes: int) -> bool:
        if beside_bytes == 0:
            return False
        if isinstance(member.outcome, Failure):
            return member.outcome.reason == "out-of-memory" or member.session.died
        return beside_bytes + needed_bytes(member.outcome) > MEMORY_SHARE * self.memory_bytes
