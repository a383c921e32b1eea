"""The processes that measure a case: one here, or one of each of those that were launched together.

The first of the launched processes measures a sweep with the help of the others.
"""

from __future__ import annotations

import itertools
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait

from actbench.errors import MeasurementError, UsageError
from actbench.experiments.ranks.follower import NEWS, ORDERS, Ask, Begin, End, Ended, Hello, News, Open, Order, Told
from actbench.experiments.runner.isolated import CaseSession, IsolatedSession
from actbench.experiments.runner.member import LocalMember, Member, Question, Report
from actbench.experiments.runner.processes import ForkServer, deadline_after, left_until
from actbench.experiments.runner.progress import Progress
from actbench.experiments.runner.worker import CaseRequest, Frames, GarbledError, Joining
from actbench.measuring.launch import Address, Meeting
from actbench.measuring.place import Place
from actbench.results.records import Case, Failure

JOINS = "actbench.measuring.ranks"
_ENDING_SECONDS = 120.0
_INTERRUPTING_SECONDS = 1.0


class Link:
    """The connection to one of the other processes."""

    def __init__(self, frames: Frames, hello: Hello, size: int) -> None:
        self._frames = frames
        self._size = size
        self.hello = hello

    @property
    def socket(self) -> socket.socket:
        """What becomes ready where there is something to :meth:`read`."""
        return self._frames.socket

    def order(self, order: Order) -> None:
        """Send an order; a MeasurementError if the process is gone."""
        try:
            self._frames.send(ORDERS.dump_json(order))
        except OSError:
            raise self._gone() from None

    def read(self) -> News | None:
        """Return what the process tells, once it is whole; a MeasurementError if the process is gone."""
        try:
            message = self._frames.read()
        except (EOFError, OSError, GarbledError):
            raise self._gone() from None
        return None if message is None else NEWS.validate_json(message)

    def _gone(self) -> MeasurementError:
        time.sleep(_INTERRUPTING_SECONDS)  # Ctrl-C ends all processes: this one hears of it here
        return MeasurementError(
            f"process {self.hello.rank} of {self._size}, on {self.hello.host}, is gone, and no case is measured "
            "without it; what it wrote last says why. Start the same command again: it goes on with the rows that are "
            "left"
        )

    def close(self) -> None:
        """Let the process end."""
        self._frames.close()


class RemoteMember:
    """A process that another of the launched processes has forked, called by a number."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self._is_open = True
        link.order(Open(number=number))

    @property
    def sources(self) -> Sequence[socket.socket]:
        """The socket of the link."""
        return [self._link.socket]

    def ask(self, question: Question, deadline: float | None) -> None:
        """Send a question; see :class:`~actbench.experiments.runner.member.Member`."""
        self._link.order(Ask(number=self._number, question=question))

    def read(self, deadline: float | None) -> Report | None:
        """Return what came of the question; see :class:`~actbench.experiments.runner.member.Member`."""
        news = self._link.read()
        return news.report if isinstance(news, Told) and news.number == self._number else None

    def close(self) -> None:
        """Let the process end, and wait until it is gone."""
        self._end(killed=False)

    def kill(self) -> None:
        """Kill the process, and wait until it is gone."""
        with suppress(MeasurementError):  # what started it is gone, and the process with it
            self._end(killed=True)

    def _end(self, *, killed: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._link.order(End(number=self._number, killed=killed))
        deadline = deadline_after(_ENDING_SECONDS)
        while wait([self._link.socket], left_until(deadline)):
            if self._link.read() == Ended(number=self._number):
                return


class Team:
    """All launched processes, as the first one has them; ``size`` is how many there are.

    ``joins`` is the module by which those of a case join each other; see
    :class:`~actbench.experiments.runner.worker.Joining`.
    """

    def __init__(self, place: Place, address: Address, links: Sequence[Link], joins: str = JOINS) -> None:
        self.size = place.size
        self._place = place
        self._address = address
        self._links = links
        self._joins = joins
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()

    def begin(self, bench: str, preload: Sequence[str]) -> None:
        """Have the other processes start their fork servers."""
        for link in self._links:
            link.order(Begin(bench=bench, preload=tuple(preload)))

    def open(
        self, server: ForkServer, case: Case, size: int, timeout_seconds: float | None, *, is_trial: bool = False
    ) -> CaseSession:
        """Start the processes of a case, one forked by each of the first ``size`` launched processes.

        ``server`` is that of this process.

        Raises:
            MeasurementError: One of the launched processes is gone.
        """
        number = next(self._numbers)
        links = self._links[: size - 1]
        local_ranks = [self._place.local_rank, *(link.hello.local_rank for link in links)]
        requests = [
            CaseRequest(case=case, is_trial=is_trial, joining=self._joining(number, rank, size, local_rank))
            for rank, local_rank in enumerate(local_ranks)
        ]
        members: list[Member] = [LocalMember(server), *(RemoteMember(link, number) for link in links)]
        return CaseSession(members, requests, timeout_seconds)

    def _joining(self, number: int, rank: int, size: int, local_rank: int) -> Joining:
        meeting = Meeting(
            host=self._address.host,
            port=self._address.port,
            name=f"actbench/{self._name}/{number}",
            rank=rank,
            size=size,
            local_rank=local_rank,
        )
        return Joining(module=self._joins, text=meeting.model_dump_json())


@dataclass(frozen=True)
class Launched:
    """The processes there are, and those that cases need.

    Attributes:
        team: All processes where several were launched together; None for this one alone.
        needed: How many processes train together in a case.
    """

    team: Team | None = None
    needed: Callable[[Case], int] = lambda case: 1

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
    ``progress`` is told of simulated steps that take long. ``printed`` is the folder for what unchanged scripts print.
    """

    server: ForkServer
    timeout_seconds: float | None
    launched: Launched = ALONE
    gpu: str | None = None
    progress: Progress = field(default_factory=Progress)
    printed: str | None = None

    def open(self, case: Case, *, is_trial: bool = False) -> CaseSession:
        """Start what measures a case; a MeasurementError if a fork server or a launched process is gone."""
        session = self._opened(case, is_trial)
        session.said = partial(self.progress.said, case)
        return session

    def _opened(self, case: Case, is_trial: bool) -> CaseSession:
        team = self.launched.team
        if team is not None and self.launched.spreads(case):
            return team.open(self.server, case, self.launched.needed(case), self.timeout_seconds, is_trial=is_trial)
        is_shown = case.script is not None and case.scheme == "exact" and not is_trial
        printed = self.printed if is_shown else None
        return IsolatedSession(
            self.server, case, self.timeout_seconds, is_trial=is_trial, gpu=self.gpu, printed=printed
        )
