"""Cases and tasks in processes of their own, whose death or delay is an outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from actbench import errors
from actbench.errors import ActbenchError, MeasurementError
from actbench.experiments.runner import merged
from actbench.experiments.runner.member import LocalMember, Member, Question, Report
from actbench.experiments.runner.processes import (
    ForkServer,
    NoAnswerError,
    Process,
    ProcessDiedError,
    deadline_after,
    describe,
    left_until,
)
from actbench.experiments.runner.worker import (
    Answer,
    AnyReply,
    CaseRequest,
    GarbledError,
    Lost,
    Raised,
    Seconds,
    TaskRequest,
)
from actbench.results.machine import available_memory_bytes
from actbench.results.measured import Measurement
from actbench.results.records import Case, Failure
from actbench.units import format_bytes, format_seconds

LOG = logging.getLogger(__name__)
"""Tells, for ``--debug``, what the processes of failed cases wrote: their tracebacks."""

_GRACE_SECONDS = 10.0
"""How long the rank that others lost may take to say why it ended."""


class CaseSession:
    """``actbench.measuring.bench.Session`` in other processes, one of each rank; errors come back as failures.

    ``timeout_seconds`` limits the time that the processes may work; waiting for its turn is not work. Where one of
    several fails, so does the case, and the others are killed. ``died`` is whether one ended without an answer.
    """

    def __init__(
        self, members: Sequence[Member], requests: Sequence[CaseRequest], timeout_seconds: float | None
    ) -> None:
        self._members = members
        self._requests = requests
        self._timeout_seconds = timeout_seconds
        self._worked_seconds = 0.0
        self.died = False

    def memory(self) -> Measurement | Failure:
        """Build the case and read everything but time."""
        replies = self._ask([Question.memory(request) for request in self._requests])
        if isinstance(replies, Failure):
            return replies
        return merged.measurement([reply for reply in replies if isinstance(reply, Measurement)])

    def time(self, steps: int) -> tuple[float, ...] | Failure | None:
        """Run one round of timed steps; None where the meter has no clock."""
        replies = self._ask([Question.time(steps)] * len(self._members))
        if isinstance(replies, Failure):
            return replies
        return merged.seconds([reply.steps for reply in replies if isinstance(reply, Seconds)])

    def _ask(self, questions: Sequence[Question]) -> list[AnyReply] | Failure:
        """Ask each process its question, and return their answers by rank, or the failure of one.

        Raises:
            MeasurementError: Who started a process is gone, and the process with it.
        """
        left = None if self._timeout_seconds is None else max(0.0, self._timeout_seconds - self._worked_seconds)
        started, deadline = time.monotonic(), deadline_after(left)
        try:
            for member, question in zip(self._members, questions, strict=True):
                member.ask(question, deadline)
            return self._answers(deadline)
        except NoAnswerError:
            self._kill()
            limit = format_seconds(self._timeout_seconds or 0)
            return Failure(
                reason="timeout",
                message=f"the case worked for longer than --timeout {limit} and was stopped while "
                f"{questions[0].doing}; allow more",
            )
        finally:
            self._worked_seconds += time.monotonic() - started

    def _answers(self, deadline: float | None) -> list[AnyReply] | Failure:
        found: dict[int, AnyReply] = {}
        lost: Failure | None = None
        grace: float | None = None
        waiting = dict(enumerate(self._members))
        while waiting:
            sources = [source for member in waiting.values() for source in member.sources]
            ready = wait(sources, left_until(grace or deadline))
            if not ready:
                if lost is not None:
                    break
                raise NoAnswerError
            for rank, member in list(waiting.items()):
                report = member.read(deadline) if any(source in ready for source in member.sources) else None
                if report is None:
                    continue
                del waiting[rank]
                self._note(rank, report)
                if isinstance(report.reply, Failure):
                    return self._failed(rank, report.reply)
                if isinstance(report.reply, Lost):
                    lost = lost or self._failed_because(rank, report.reply)
                    grace = grace or deadline_after(_GRACE_SECONDS)
                found[rank] = report.reply
        if lost is not None:
            self._kill()
            return lost
        return [found[rank] for rank in sorted(found)]

    def _note(self, rank: int, report: Report) -> None:
        self.died |= report.died
        if report.written:
            LOG.debug("%s, rank %d: in its process:\n%s", self._requests[rank].case.name, rank, report.written)

    def _failed(self, rank: int, failure: Failure) -> Failure:
        """Return the failure of one process as that of the case; the others would wait for it."""
        if len(self._members) == 1:
            return failure
        self._kill()
        return failure.model_copy(update={"message": f"rank {rank} of {len(self._members)}: {failure.message}"})

    def _failed_because(self, rank: int, lost: Lost) -> Failure:
        return Failure(reason="crash", message=f"rank {rank} of {len(self._members)} lost the others: {lost.message}")

    def close(self) -> None:
        """Let the processes end."""
        for member in self._members:
            member.close()

    def _kill(self) -> None:
        for member in self._members:
            member.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._kill()


class IsolatedSession(CaseSession):
    """A case of one process, on this machine; of a trial nothing but the peak is read."""

    def __init__(
        self, server: ForkServer, case: Case, timeout_seconds: float | None, *, is_trial: bool = False
    ) -> None:
        super().__init__([LocalMember(server)], [CaseRequest(case=case, is_trial=is_trial)], timeout_seconds)


class Tasks:
    """Calls functions of a module, from text to text, each in a process of its own.

    ``said`` is the end of what the last answered call printed.

    Raises:
        MeasurementError: The processes cannot be started at all.
    """

    def __init__(self, module: str, preload: Sequence[str] = ()) -> None:
        self._server = ForkServer(module, preload, kind="task")
        self.said = ""

    def call(
        self,
        function: str,
        text: str,
        *,
        doing: str,
        timeout_seconds: float | None = None,
        memory_bytes: int | None = None,
    ) -> str:
        """Call a function and return what it returns; ``doing`` is for messages, such as "converting x".

        Raises:
            ActbenchError: The one that the function raised; or, as a MeasurementError, that it took too much time or
                memory, raised something else, or ended its process.
        """
        free = available_memory_bytes()
        memory = free if memory_bytes is None else min(free, memory_bytes)
        asked = TaskRequest(function=function, text=text, memory_bytes=memory)
        process = self._server.fork()
        try:
            answer = _answer(process, asked, doing, timeout_seconds)
        except BaseException:
            process.stop()
            raise
        self.said = process.said
        process.end()
        if answer.raised is not None:
            raise _error(answer.raised, doing, memory)
        return answer.text or ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


def _answer(process: Process, asked: TaskRequest, doing: str, timeout_seconds: float | None) -> Answer:
    try:
        return Answer.model_validate_json(process.ask(asked.model_dump_json().encode(), timeout_seconds))
    except ProcessDiedError as death:
        raise MeasurementError(f"{doing}: its process {describe(death)}") from None
    except NoAnswerError:
        limit = format_seconds(timeout_seconds or 0)
        raise MeasurementError(f"{doing} took longer than --timeout {limit} and was stopped; allow more") from None
    except (GarbledError, ValidationError):
        raise MeasurementError(
            f"{doing}: its process sent something else than an answer; does the model write into descriptors that are "
            "not its own?"
        ) from None


def _error(raised: Raised, doing: str, memory_bytes: int) -> ActbenchError:
    error: ActbenchError
    if raised.out_of_memory:
        error = MeasurementError(
            f"{doing} needs more memory than the {format_bytes(memory_bytes)} that it may take: free some, raise "
            "--memory-limit where it is given, or take a smaller model"
        )
    elif raised.kind is not None:
        error = getattr(errors, raised.kind)(raised.message)
    else:
        error = MeasurementError(f"{doing} failed: {raised.message} ('actbench --debug …' shows where)")
    error.add_note(f"In the process of its own:\n{raised.trace}")
    return error
