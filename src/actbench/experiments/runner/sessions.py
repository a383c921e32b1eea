"""Which processes measure a case: one here, or one of each of those that were launched together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actbench.errors import UsageError
from actbench.experiments.ranks.team import Team
from actbench.experiments.runner.isolated import CaseSession, IsolatedSession
from actbench.experiments.runner.processes import ForkServer
from actbench.results.records import Case, Failure


def alone(case: Case) -> int:
    """Return that a case needs one process."""
    return 1


@dataclass(frozen=True)
class Launched:
    """The processes there are, and those that cases need.

    Attributes:
        team: All processes where several were launched together; None for this one alone.
        needed: How many processes train together in a case.
    """

    team: Team | None = None
    needed: Callable[[Case], int] = alone

    @property
    def size(self) -> int:
        """How many processes there are."""
        return 1 if self.team is None else self.team.size

    def spreads(self, case: Case) -> bool:
        """Whether several processes measure a case; a simulation needs one, whatever it stands for."""
        return case.meter != "simulated" and self.needed(case) > 1

    def misfit(self, case: Case) -> Failure | None:
        """Return why a case cannot be measured: it needs more processes than there are; None where it can."""
        wanted = self.needed(case)
        if not self.spreads(case) or wanted <= self.size:
            return None
        found = "one was started" if self.size == 1 else f"{self.size} were launched"
        return Failure(
            reason="unavailable",
            message=f"{case.scheme} trains in {wanted} processes, and {found}: start 'torchrun --nproc-per-node "
            f"{wanted} -m actbench …', or take --meter simulated, which needs one",
        )

    def check(self, cases: list[Case]) -> None:
        """Raise a UsageError where several processes were launched, and no case of a plan is for several of them."""
        if self.size == 1 or any(self.spreads(case) and self.misfit(case) is None for case in cases):
            return
        wanted = sorted({self.needed(case) for case in cases if self.spreads(case)})
        if not wanted:
            raise UsageError(
                f"{self.size} processes were launched, and every case here needs one: start 'actbench …' itself, or "
                f"add a scheme for {self.size} processes and --meter cpu or cuda, such as --scheme ddp:{self.size}"
            )
        raise UsageError(
            f"{self.size} processes were launched, and the schemes here need {' or '.join(map(str, wanted))}: start "
            f"'torchrun --nproc-per-node {wanted[-1]} -m actbench …', or give them {self.size}"
        )


ALONE = Launched()
"""This process alone, with cases that need one."""


@dataclass(frozen=True)
class Sessions:
    """Starts the processes of cases, which may work for so many seconds each.

    ``gpu`` names the device of cases of one process in ``CUDA_VISIBLE_DEVICES``; None for the first that is visible.
    """

    server: ForkServer
    timeout_seconds: float | None
    launched: Launched = ALONE
    gpu: str | None = None

    def open(self, case: Case, *, is_trial: bool = False) -> CaseSession:
        """Start what measures a case.

        Raises:
            MeasurementError: A fork server, or one of the launched processes, is gone.
        """
        team = self.launched.team
        if team is not None and self.launched.spreads(case):
            return team.open(self.server, case, self.launched.needed(case), self.timeout_seconds, is_trial=is_trial)
        return IsolatedSession(self.server, case, self.timeout_seconds, is_trial=is_trial, gpu=self.gpu)
