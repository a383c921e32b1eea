"""Runs functions from text to text in their own processes; a process that dies or hangs is an error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from pydantic import ValidationError

from actbench import errors
from actbench.errors import ActbenchError, MeasurementError
from actbench.machine import available_memory_bytes
from actbench.run.frames import GarbledError
from actbench.run.processes import ForkServer, NoAnswerError, Process, ProcessDiedError, describe
from actbench.run.worker import Answer, Raised, TaskRequest
from actbench.units import format_bytes, format_seconds


class Tasks:
    """Calls functions of a module, from text to text, each in a process of its own.

    ``said`` is the end of what the last answered call printed. A ``server`` that is given is not closed with it.

    Raises:
        MeasurementError: The processes cannot be started at all.
    """

    def __init__(self, module: str, preload: Sequence[str] = (), server: ForkServer | None = None) -> None:
        self._module, self._held = module, ExitStack()
        self.server = server or self._held.enter_context(ForkServer(module, preload))
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
        asked = TaskRequest(module=self._module, function=function, text=text, memory_bytes=memory)
        process = self.server.fork()
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
        self._held.close()


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
