"""A launched process other than the first: the orders that it takes and carries out, in JSON over a socket.

It starts the processes of cases here, and passes on their answers.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter

from actbench.model.data import Data
from actbench.run import replies
from actbench.run.frames import Frames
from actbench.run.member import LocalMember, Question, Report
from actbench.run.processes import ForkServer


class Hello(Data):
    """What a process says of itself when it comes.

    Attributes:
        host: Name of its machine, for messages.
        versions: Of actbench, with a digest of its files, and of torch: all processes must have the same.
    """

    rank: int
    local_rank: int
    host: str
    versions: str


class Begin(Data):
    """Be ready to start the processes of cases, in place of those that were started before."""

    kind: Literal["begin"] = "begin"
    bench: str
    preload: tuple[str, ...]


class Open(Data):
    """Start a process, which is called by a number from now on."""

    kind: Literal["open"] = "open"
    number: int


class Ask(Data):
    """Ask a process; the answer is a :class:`Told`."""

    kind: Literal["ask"] = "ask"
    number: int
    question: Question


class End(Data):
    """Let a process end by itself, or kill it; answered by :class:`Ended` when it is gone."""

    kind: Literal["end"] = "end"
    number: int
    killed: bool = False


class Told(Data):
    """The answer to a question."""

    kind: Literal["told"] = "told"
    number: int
    report: Report


class Ended(Data):
    """A process is gone."""

    kind: Literal["ended"] = "ended"
    number: int


Order = Begin | Open | Ask | End
News = Told | Ended
ORDERS: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])
NEWS: TypeAdapter[News] = TypeAdapter(Annotated[News, Field(discriminator="kind")])


class Follower:
    """Carries out the orders of the first process until that process ends; no process of a case is left here then.

    Raises:
        MeasurementError: The processes of cases cannot be started at all, or the fork server is gone.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._servers = ExitStack()
        self._server: ForkServer | None = None
        self._members: dict[int, LocalMember] = {}
        self._asked: set[int] = set()

    def follow(self) -> None:
        """Take orders until the first process closes the connection or is gone."""
        while True:
            sources = {source: number for number in self._asked for source in self._members[number].sources}
            ready = wait([self._frames.socket, *sources])
            if self._frames.socket in ready:
                try:
                    message = self._frames.read()
                except (EOFError, OSError):
                    return
                if message is not None:
                    self._obey(ORDERS.validate_json(message))
                continue  # what is ready may be gone by now
            for number in {number for source, number in sources.items() if source in ready}:
                self._pass_on(number)

    def _obey(self, order: Order) -> None:
        if isinstance(order, Begin):
            self._servers.close()
            self._server = self._servers.enter_context(ForkServer(order.bench, order.preload))
        elif isinstance(order, Open) and self._server is not None:
            self._members[order.number] = LocalMember(self._server)
        elif isinstance(order, Ask):
            self._members[order.number].ask(order.question, deadline=None)
            self._asked.add(order.number)
        elif isinstance(order, End):
            self._end(order)

    def _end(self, order: End) -> None:
        self._asked.discard(order.number)
        member = self._members.pop(order.number, None)
        if member is not None:
            member.kill() if order.killed else member.close()
        self._tell(Ended(number=order.number))

    def _pass_on(self, number: int) -> None:
        report = self._members[number].read(None)
        if report is not None:
            if report.reply.kind not in replies.NEWS:
                self._asked.discard(number)
            self._tell(Told(number=number, report=report))

    def _tell(self, news: News) -> None:
        with suppress(OSError):  # the first process is gone, which is noticed where its orders are read
            self._frames.send(NEWS.dump_json(news))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()
