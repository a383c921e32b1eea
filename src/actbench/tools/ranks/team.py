"""The executor of processes that were launched together: the first measures a sweep with the help of the others."""

from __future__ import annotations

import itertools
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait

from actbench.errors import MeasurementError, UsageError
from actbench.measuring.rank import Rank
from actbench.model.records import Case
from actbench.run.executor import Work
from actbench.run.frames import Frames, GarbledError
from actbench.run.isolated import CaseSession
from actbench.run.local import LocalExecutor
from actbench.run.member import LocalMember, Member, Question, Report
from actbench.run.processes import ForkServer, deadline_after, left_until
from actbench.run.worker import CaseRequest, Joining
from actbench.tools.ranks.follower import NEWS, ORDERS, Ask, Begin, End, Ended, Hello, News, Open, Order, Told
from actbench.tools.ranks.launch import Address, Meeting

JOINS = "actbench.tools.ranks.world"
_ENDING_SECONDS = 60.0  # a launched process does nothing but pass on orders, so that a longer silence is no work
_INTERRUPTING_SECONDS = 1.0

_WITHOUT_IT = "no case is measured without it. Start the same command again: it goes on with the rows that are left"


class Link:
    """The connection to one of the other processes."""

    def __init__(self, frames: Frames, hello: Hello, size: int) -> None:
        self._frames = frames
        self._size = size
        self._is_silent = False
        self.hello = hello

    @property
    def socket(self) -> socket.socket:
        """The socket, which is ready when there is something to :meth:`read`."""
        return self._frames.socket

    def order(self, order: Order) -> None:
        """Send an order; a MeasurementError if the process is gone or did not answer the one before."""
        if self._is_silent:
            raise MeasurementError(f"{self._who} does not answer, and {_WITHOUT_IT}")
        try:
            self._frames.send(ORDERS.dump_json(order))
        except OSError:
            raise self._gone() from None

    def read(self) -> News | None:
        """Return an answer of the process, once it has come whole; a MeasurementError if the process is gone."""
        try:
            message = self._frames.read()
        except (EOFError, OSError, GarbledError):
            raise self._gone() from None
        return None if message is None else NEWS.validate_json(message)

    def _gone(self) -> MeasurementError:
        time.sleep(_INTERRUPTING_SECONDS)  # Ctrl-C ends all processes: this one hears of it here
        return MeasurementError(f"{self._who} is gone, what it wrote last says why, and {_WITHOUT_IT}")

    def fall_silent(self) -> None:
        """Note that the process does not answer, such as one that was stopped: it takes no more orders."""
        self._is_silent = True

    @property
    def _who(self) -> str:
        return f"process {self.hello.rank} of {self._size}, on {self.hello.host},"

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
        """Send a question; see :class:`~actbench.run.member.Member`."""
        self._link.order(Ask(number=self._number, question=question))

    def read(self, deadline: float | None) -> Report | None:
        """Return the answer to the question; see :class:`~actbench.run.member.Member`."""
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
        self._link.fall_silent()


class Team:
    """All launched processes, as the first one has them; ``size`` is how many there are.

    They are the :class:`~actbench.run.executor.Machines` of schemes that spread a model. ``joins`` is
    the module by which those of a case join each other; see
    :class:`~actbench.run.worker.Joining`.
    """

    def __init__(self, place: Rank, address: Address, links: Sequence[Link], joins: str = JOINS) -> None:
        self.size = place.size
        self.elsewhere = False
        self._place = place
        self._address = address
        self._links = links
        self._joins = joins
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()

    def check(self, cases: Sequence[Case], needed: Callable[[Case], int]) -> None:
        """Raise a UsageError where no case of a plan is for several processes."""
        spread = {needed(case) for case in cases if case.meter != "simulated" and needed(case) > 1}
        if any(wanted <= self.size for wanted in spread):
            return
        if not spread:
            raise UsageError(
                f"{self.size} processes were launched, and every case here needs one: start 'actbench …' itself, or "
                f"add a scheme for {self.size} processes and --meter cpu or cuda, such as --scheme ddp:{self.size}"
            )
        wanted = sorted(spread)
        raise UsageError(
            f"{self.size} processes were launched, and the schemes here need {' or '.join(map(str, wanted))}: start "
            f"'torchrun --nproc-per-node {wanted[-1]} -m actbench …', or give them {self.size}"
        )

    def start(self, work: Work) -> RankExecutor:
        """Have the other processes start their fork servers, and return the executor of all."""
        for link in self._links:
            link.order(Begin(bench=work.bench, preload=work.modules))
        return RankExecutor(work, self)

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


class RankExecutor(LocalExecutor):
    """Starts a case in as many of the launched processes as it needs, and in one here where it needs one."""

    def __init__(self, work: Work, team: Team) -> None:
        self._team = team
        self.size = team.size
        super().__init__(work)

    def open(self, case: Case, gpu: str | None, *, is_trial: bool) -> CaseSession:
        """Start what measures a case; a MeasurementError if a fork server or a launched process is gone."""
        if not self.spreads(case):
            return super().open(case, gpu, is_trial=is_trial)
        return self._team.open(self.server, case, self.work.needed(case), self.work.timeout_seconds, is_trial=is_trial)
