"""Cases and tasks in processes of their own, whose death or delay is an outcome."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from pydantic import ValidationError

from actbench import errors
from actbench.errors import ActbenchError, MeasurementError
from actbench.experiments.runner.processes import ForkServer, NoAnswerError, Process, ProcessDiedError, describe
from actbench.experiments.runner.worker import REPLIES, Answer, CaseRequest, GarbledError, Raised, Seconds, TaskRequest
from actbench.results.machine import available_memory_bytes, memory_kills
from actbench.results.measured import Measurement
from actbench.results.records import Case, Failure
from actbench.units import format_bytes, format_seconds

LOG = logging.getLogger(__name__)
"""Tells, for ``--debug``, what the processes of failed cases wrote: their tracebacks."""

Reply = TypeVar("Reply", Measurement, Seconds)
T = TypeVar("T")


class IsolatedProcess:
    """A process that answers requests, and whose death or delay is a failure.

    ``timeout_seconds`` limits the time that it may work; waiting for its turn is not work. ``what`` it works on, and
    ``again``, what has it tried again, are for messages. ``died`` is whether the process ended without an answer.
    """

    def __init__(
        self,
        server: ForkServer,
        timeout_seconds: float | None,
        *,
        what: str = "case",
        again: str = "give --retry-failed",
    ) -> None:
        self._kills_before = memory_kills()
        self._process = server.fork()
        self._what, self._again = what, again
        self._timeout_seconds = timeout_seconds
        self._worked_seconds = 0.0
        self.died = False

    @property
    def written(self) -> str:
        """What it wrote, a traceback too; of very much the last."""
        return self._process.written

    def ask(self, request: bytes, read: Callable[[bytes], T], doing: str) -> T | Failure:
        """Send a request and return what ``read`` makes of the answer, or the failure of the process.

        Raises:
            MeasurementError: The fork server is gone, and this process with it.
        """
        left = None if self._timeout_seconds is None else max(0.0, self._timeout_seconds - self._worked_seconds)
        started = time.monotonic()
        try:
            return read(self._process.ask(request, left))
        except ProcessDiedError as death:
            if death.code is None:
                raise MeasurementError("the process that starts the cases is gone; run the sweep again") from None
            self.died = True
            return self._failure(death)
        except NoAnswerError:
            self._process.kill()
            limit = format_seconds(self._timeout_seconds or 0)
            return Failure(
                reason="timeout",
                message=f"the {self._what} worked for longer than --timeout {limit} and was stopped while {doing}; "
                "allow more",
            )
        except (GarbledError, ValidationError) as garbled:
            self._process.kill()
            found = garbled if isinstance(garbled, GarbledError) else "an answer that cannot be read"
            return Failure(
                reason="crash",
                message=f"the process of the {self._what} sent {found}; does the model write into descriptors that are "
                f"not its own? The process was stopped while {doing}",
            )
        finally:
            self._worked_seconds += time.monotonic() - started

    def _failure(self, death: ProcessDiedError) -> Failure:
        kills = memory_kills()
        before = self._kills_before
        if death.code == -signal.SIGKILL and kills is not None and before is not None and kills > before:
            return Failure(
                reason="out-of-memory",
                message=f"the kernel ended the process of the {self._what}, because memory had run out: try a smaller "
                f"batch, or close other programs and {self._again}",
            )
        return Failure(
            reason="crash", message=f"the process of the {self._what} {describe(death, f' and {self._again}')}"
        )

    def close(self) -> None:
        """Let the process end."""
        self._process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._process.kill()


class IsolatedSession(IsolatedProcess):
    """``actbench.measuring.bench.Session`` in another process; errors come back as failures.

    ``is_trial`` and ``gpu`` are as in :class:`~actbench.experiments.runner.worker.CaseRequest`.
    """

    def __init__(
        self,
        server: ForkServer,
        case: Case,
        timeout_seconds: float | None,
        *,
        is_trial: bool = False,
        gpu: str | None = None,
    ) -> None:
        super().__init__(server, timeout_seconds)
        self._name, self._request = case.name, CaseRequest(case=case, is_trial=is_trial, gpu=gpu)

    def memory(self) -> Measurement | Failure:
        """Build the case and read everything but time."""
        return self._reply(self._request.model_dump_json(), Measurement, "its memory was read")

    def time(self, steps: int) -> tuple[float, ...] | Failure | None:
        """Run one round of timed steps; None where the meter has no clock."""
        reply = self._reply(str(steps), Seconds, "its steps were timed")
        return reply.steps if isinstance(reply, Seconds) else reply

    def _reply(self, request: str, expected: type[Reply], doing: str) -> Reply | Failure:
        def read(answer: bytes) -> Reply | Failure:
            reply = REPLIES.validate_json(answer)
            if isinstance(reply, Failure):
                LOG.debug("%s: in its process:\n%s", self._name, self.written)
            if isinstance(reply, expected | Failure):
                return reply
            raise GarbledError("the answer to another question")

        return self.ask(request.encode(), read, doing)


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
