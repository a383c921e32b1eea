"""One case of a cohort: it has read its memory and waits in its process for its turns to be timed."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from actbench.records import Case, Failure, Measurement, Outcome
from actbench.runner.isolated import IsolatedSession

_ROUNDS = 5


def held_bytes(outcome: Outcome) -> int:
    """Return the memory that a case may come to hold in a turn; nothing once it has failed and its process ended."""
    if isinstance(outcome, Failure):
        return 0
    return max(outcome.peak_bytes, outcome.reserved_bytes or 0)


@dataclass(eq=False)
class Member:
    """A case in its process, with what is known of it so far.

    Attributes:
        case: The case.
        session: Its process.
        outcome: What it read of its memory, or how it failed.
        step_seconds: Seconds of the steps timed so far.
        has_clock: Whether its meter reads time.
    """

    case: Case
    session: IsolatedSession
    outcome: Measurement | Failure
    step_seconds: list[float] = field(default_factory=list)
    has_clock: bool = True

    @property
    def wants_turn(self) -> bool:
        """Whether it has too few steps timed."""
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

    def result(self, timing_round: str, reference: Member | None) -> Outcome:
        """Return the outcome with the seconds of all rounds.

        Args:
            timing_round: What the group that it took turns with is called.
            reference: The exact model that took turns with it, where that has no record of its own to show for it.
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
