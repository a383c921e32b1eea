"""The process that measures a case, or one of its ranks, as the sweep sees it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from typing import Final, Literal, Protocol

from pydantic import ValidationError

from actbench.errors import MeasurementError
from actbench.machine import memory_kills
from actbench.model.data import Data
from actbench.model.records import Failure
from actbench.run.frames import GarbledError
from actbench.run.processes import ForkServer, ProcessDiedError, describe
from actbench.run.replies import NEWS, REPLIES, Reply
from actbench.run.worker import CaseRequest

_DOING: Final = {"measured": "its memory was read", "timed": "its steps were timed"}


class Question(Data):
    """What the process of a case is asked, and the kind of reply that answers it."""

    text: str
    answer: Literal["measured", "timed"]

    @classmethod
    def memory(cls, request: CaseRequest) -> Question:
        """Ask for everything but time."""
        return cls(text=request.model_dump_json(), answer="measured")

    @classmethod
    def time(cls, steps: int) -> Question:
        """Ask for one round of timed steps."""
        return cls(text=str(steps), answer="timed")

    @property
    def doing(self) -> str:
        """What the process does meanwhile, as the end of a sentence."""
        return _DOING[self.answer]


class Report(Data):
    """The answer to a question.

    Attributes:
        reply: Of the process; a failure where it died or sent no reply.
        written: What the process wrote, where it failed: its traceback.
        died: Whether it ended without an answer.
    """

    reply: Reply
    written: str = ""
    died: bool = False


class Member(Protocol):
    """One process of a case."""

    @property
    def sources(self) -> Sequence[socket.socket]:
        """The file descriptors to wait for: one becomes ready when :meth:`read` has data."""

    def ask(self, question: Question, deadline: float | None) -> None:
        """Send a question.

        Raises:
            NoAnswerError: The process did not take the question until the deadline.
            MeasurementError: The server that started the process is gone, and the process with it.
        """

    def read(self, deadline: float | None) -> Report | None:
        """Return the answer once it is whole; to be called when one of ``sources`` is ready.

        Raises:
            MeasurementError: The server that started the process is gone, and the process with it.
        """

    def close(self) -> None:
        """Let the process end."""

    def kill(self) -> None:
        """Kill the process and all its descendants, and wait until it is gone."""


class LocalMember:
    """A process on this machine, forked from a server."""

    def __init__(self, server: ForkServer) -> None:
        self._kills_before = memory_kills()
        self._process = server.fork()
        self._question: Question | None = None

    @property
    def sources(self) -> Sequence[socket.socket]:
        """The sockets of the process."""
        return self._process.sources

    def ask(self, question: Question, deadline: float | None) -> None:
        """Send a question; see :class:`Member`."""
        self._question = question
        self._process.send(question.text.encode(), deadline)

    def read(self, deadline: float | None) -> Report | None:
        """Return the answer to the question; see :class:`Member`."""
        if self._question is None:
            raise RuntimeError("no question was asked")
        try:
            text = self._process.read(deadline)
            if text is None:
                return None
            reply = REPLIES.validate_json(text)
            if reply.kind not in (self._question.answer, "failed", "lost", *NEWS):
                raise GarbledError("the answer to another question")
        except ProcessDiedError as death:
            failure = failure_of_death(death, self._kills_before)
            return Report(reply=failure, died=True)
        except (GarbledError, ValidationError) as garbled:
            self._process.kill()
            failure = failure_of_garbled(garbled, self._question.doing)
            return Report(reply=failure)
        return Report(reply=reply, written=self._process.written if reply.kind in ("failed", "lost") else "")

    def close(self) -> None:
        """Let the process end; it is killed if it does not."""
        self._process.end()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def interrupt(self) -> None:
        """Have the process killed, and wait for nothing."""
        self._process.interrupt()


def failure_of_death(death: ProcessDiedError, kills_before: int | None) -> Failure:
    """Return the failure of a process that ended without an answer.

    Args:
        death: How it ended.
        kills_before: How many processes the kernel had killed for memory when this one started; None if unknown.

    Raises:
        MeasurementError: The fork server is gone, and the process with it.
    """
    if death.code is None:
        raise MeasurementError("the process that starts the cases is gone; run the sweep again") from None
    kills = memory_kills()
    if death.code == -signal.SIGKILL and kills is not None and kills_before is not None and kills > kills_before:
        return Failure(
            reason="out-of-memory",
            message="the kernel ended the process of the case, because memory had run out: try a smaller batch, or "
            "close other programs and give --retry-failed",
        )
    return Failure(reason="crash", message=f"the process of the case {describe(death, ' and give --retry-failed')}")


def failure_of_garbled(garbled: Exception, doing: str) -> Failure:
    """Return the failure of a process that sent something else than an answer and was stopped."""
    found = garbled if isinstance(garbled, GarbledError) else "an answer that cannot be read"
    return Failure(
        reason="crash",
        message=f"the process of the case sent {found}; does the model write into descriptors that are not its own? "
        f"The process was stopped while {doing}",
    )
