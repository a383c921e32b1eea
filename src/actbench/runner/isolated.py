"""A case measured in a process of its own, whose death or delay is an outcome like any other."""

from __future__ import annotations

import signal
import time
from types import TracebackType
from typing import Self, TypeVar

from pydantic import ValidationError

from actbench.errors import MeasurementError
from actbench.machine import memory_kills
from actbench.records import Case, Failure, Measurement
from actbench.runner.deaths import describe
from actbench.runner.frames import GarbledError
from actbench.runner.processes import ForkServer, NoAnswerError, ProcessDiedError
from actbench.runner.worker import REPLIES, Seconds
from actbench.units import format_seconds

Reply = TypeVar("Reply", Measurement, Seconds)


class IsolatedSession:
    """What ``actbench.bench.Session`` is, in another process; errors come back as failures.

    Args:
        server: Where the process is forked.
        case: What it measures.
        timeout_seconds: Time that the process may work; waiting for its turn is not work. None is without end.

    Attributes:
        died: Whether the process ended without an answer.
    """

    def __init__(self, server: ForkServer, case: Case, timeout_seconds: float | None) -> None:
        self._kills_before = memory_kills()
        self._process = server.fork()
        self._case = case
        self._timeout_seconds = timeout_seconds
        self._worked_seconds = 0.0
        self.died = False

    def memory(self) -> Measurement | Failure:
        """Build the case and read everything but time."""
        return self._ask(self._case.model_dump_json(), Measurement, "its memory was read")

    def time(self, steps: int) -> tuple[float, ...] | Failure | None:
        """Run one round of timed steps; None where the meter has no clock."""
        reply = self._ask(str(steps), Seconds, "its steps were timed")
        return reply.steps if isinstance(reply, Seconds) else reply

    def _ask(self, request: str, expected: type[Reply], doing: str) -> Reply | Failure:
        """Send a request and return the answer, or what became of the process instead.

        Raises:
            MeasurementError: The fork server is gone, and this process with it.
        """
        left = None if self._timeout_seconds is None else max(0.0, self._timeout_seconds - self._worked_seconds)
        started = time.monotonic()
        try:
            reply = REPLIES.validate_json(self._process.ask(request.encode(), left))
            if isinstance(reply, expected | Failure):
                return reply
            raise GarbledError("the answer to another question")
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
                message=f"the case worked for longer than --timeout {limit} and was stopped while {doing}; allow more",
            )
        except (GarbledError, ValidationError) as garbled:
            self._process.kill()
            found = garbled if isinstance(garbled, GarbledError) else "an answer that cannot be read"
            return Failure(
                reason="crash",
                message=f"the process of the case sent {found}; does the model write into descriptors that are not "
                f"its own? The process was stopped while {doing}",
            )
        finally:
            self._worked_seconds += time.monotonic() - started

    def _failure(self, death: ProcessDiedError) -> Failure:
        kills = memory_kills()
        before = self._kills_before
        if death.code == -signal.SIGKILL and kills is not None and before is not None and kills > before:
            return Failure(
                reason="out-of-memory",
                message="the kernel ended the process of the case, because memory had run out: try a smaller batch, or "
                "close other programs and give --retry-failed",
            )
        advice = " and give --retry-failed"
        return Failure(reason="crash", message=f"the process of the case {describe(death, advice)}")

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
