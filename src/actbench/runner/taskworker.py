"""What runs in the process of one task: a function of a module, called with a text and answered with one."""

from __future__ import annotations

import signal
import sys
import traceback
from types import ModuleType

from actbench import errors
from actbench.records import Data
from actbench.runner import worker
from actbench.runner.frames import Frames


class Asked(Data):
    """A task: the function, what it is called with, and the memory that it may take beside what is there (or None)."""

    function: str
    text: str
    memory_bytes: int | None


class Raised(Data):
    """An error: its class where that is one of actbench's own, its message, where it arose, and whether memory ran out.

    Attributes:
        kind: Name of the class in :mod:`actbench.errors`, or None.
    """

    kind: str | None
    message: str
    trace: str
    out_of_memory: bool


class Answer(Data):
    """What the function returned, or what it raised."""

    text: str | None = None
    raised: Raised | None = None


def work(frames: Frames, module: ModuleType) -> None:
    """Do the task that comes, and answer. A SIGTERM raises in it, so that it takes back what it has begun."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was stopped"))
    asked = Asked.model_validate_json(frames.receive())
    worker.volunteer_for_the_oom_killer()
    worker.limit_memory(asked.memory_bytes)
    try:
        answer = Answer(text=getattr(module, asked.function)(asked.text)).model_dump_json()
    except BaseException as error:  # whatever a model does, SystemExit too, is an answer
        answer = Answer(raised=_raised(error)).model_dump_json()
    frames.send(answer.encode())


def _raised(error: BaseException) -> Raised:
    kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__), None)
    return Raised(
        kind=kind,
        message=errors.encodable(str(error)) if kind else errors.told(error),
        trace=errors.encodable("".join(traceback.format_exception(error))),
        out_of_memory=any(map(errors.is_out_of_memory, _causes(error))),
    )


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and what it came from, each once: foreign code may raise an error from itself."""
    found: dict[int, BaseException] = {}
    cause: BaseException | None = error
    while cause is not None and id(cause) not in found:
        found[id(cause)] = cause
        cause = cause.__cause__ if cause.__suppress_context__ else cause.__context__
    return list(found.values())
