"""What runs in a process of its own: a case, or a task, which is one call of a function."""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

from pydantic import TypeAdapter

from actbench import errors, livememory, slowsteps
from actbench.machine import available_memory_bytes
from actbench.model.data import Data
from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.run.frames import Frames
from actbench.run.printed import printing_to
from actbench.run.replies import AnyReply, Lost, Said, Seconds, Tried

_M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


class Session(Protocol):
    """One case being measured, in this process.

    Attributes:
        tried: Told of each trial of a simulated search.
        note: Called with what the user should know while the case runs, such as the peak of each step of a script.
        ends_at: The time of ``time.monotonic()`` at which the case is ended.
    """

    ends_at: float
    tried: Callable[[int, bool], object]
    note: Callable[[str], object]

    def memory(self) -> Measurement:
        """Read everything but time."""

    def time(self, steps: int) -> tuple[float, ...] | None:
        """Run one round of timed steps; the first call warms up before."""


class Joining(Data):
    """How the process of a case joins those that measure it together.

    Attributes:
        module: Its ``join(text, meter)`` returns what sessions take as ``world``, and its ``is_of_others(error)``
            says whether an error is that another of them is gone.
        text: What that module needs to know.
    """

    module: str
    text: str


class CaseRequest(Data):
    """A case to measure.

    Attributes:
        is_trial: Whether it is a trial of a search for the largest batch, whose peak alone is read.
        seconds: How long it may take in all; None without end.
        gpu: What ``CUDA_VISIBLE_DEVICES`` is in its process; None for what it is here.
        joining: How it joins the other processes that measure the case; None for a case of one process.
        printed: The folder for what a script prints; see :mod:`actbench.run.printed`. None for none.
        is_live: Whether its memory is reported while it runs.
    """

    case: Case
    is_trial: bool = False
    seconds: float | None = None
    gpu: str | None = None
    joining: Joining | None = None
    printed: str | None = None
    is_live: bool = False


@runtime_checkable
class Bench(Protocol):
    """A module that measures cases: ``actbench.measuring.bench``, that of a plug-in, or one of a test.

    It may have a ``Trial`` in addition to its ``Session``, for trials. Both take a case, and ``world`` where several
    processes measure it. A function ``before_forks`` of it is called once in the process from which those of cases are
    forked, and ``before_fork`` before each of them is.
    """

    Session: Callable[..., Session]
    failure_of: Callable[[BaseException], Failure]


def work(frames: Frames, bench: Any) -> None:
    """Measure the case, by the :class:`Bench`, or do the task that comes."""
    asked = REQUESTS.validate_json(frames.receive())
    if isinstance(asked, TaskRequest):
        _work_task(frames, asked)
    else:
        _work_case(frames, bench, asked)


def _work_case(frames: Frames, bench: Bench, asked: CaseRequest) -> None:
    """Measure a case, and answer until the other end closes the connection.

    A case is answered with a ``Measurement``, after a ``Tried`` for each trial of its search, a ``Said`` for each step
    that takes long and, if asked for, reports of its memory as ``LiveMemory``; a number of steps with ``Seconds``; an
    error with a ``Failure``, or with ``Lost`` if another rank's failure caused it.
    """
    case, began = asked.case, time.monotonic()
    # read when CUDA is first touched, which is not before the fork; a card is simulated where there is none
    if (gpu := "" if case.meter == "simulated" else asked.gpu) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    volunteer_for_the_oom_killer()
    if case.meter != "cuda":
        limit_memory()
    if case.meter == "simulated":
        map_large_blocks()
    ranks: Any = None if asked.joining is None else importlib.import_module(asked.joining.module)
    try:
        beside = {} if asked.joining is None else {"world": ranks.join(asked.joining.text, case.meter)}
        open_session = getattr(bench, "Trial", bench.Session) if asked.is_trial else bench.Session
        say = lambda text: _answer(frames, Said(text=text))  # noqa: E731
        live = (lambda report: _answer(frames, report)) if asked.is_live else None
        printing = printing_to(asked.printed) if asked.printed else nullcontext()
        with slowsteps.report_to(say), livememory.report_to(live), printing:
            session = open_session(case, **beside)
            session.note = say
            session.ends_at = math.inf if asked.seconds is None else began + asked.seconds
            session.tried = lambda batch_size, fits: _answer(frames, Tried(batch_size=batch_size, fits=fits))
            found = session.memory()
        _answer(frames, found)
        for steps in _requests(frames):
            _answer(frames, Seconds(steps=session.time(steps)))
    except BaseException as error:  # whatever a model does, SystemExit too, is an outcome of its case
        traceback.print_exc()
        failure = bench.failure_of(error)
        lost = ranks is not None and ranks.is_of_others(error)
        _answer(frames, Lost(message=failure.message) if lost else failure)


def _answer(frames: Frames, reply: AnyReply) -> None:
    frames.send(reply.model_dump_json().encode())


def _requests(frames: Frames) -> Iterator[int]:
    while True:
        try:
            yield int(frames.receive())
        except EOFError:
            return


def limit_memory(most_bytes: int | None = None) -> None:
    """Make allocations that the machine cannot serve fail here, before the kernel kills something for them.

    Limited are the process's data, not its address space, of which libraries reserve far more than they use: what it
    has and ``most_bytes`` more, or all that is free. Only Linux counts them: macOS has no such limit.
    """
    if sys.platform != "linux":
        return
    limit = _data_bytes() + (available_memory_bytes() if most_bytes is None else most_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def map_large_blocks() -> None:
    """Let the C library give freed blocks of 1 MiB and more back at once, where it is glibc.

    Values that a simulation keeps for a moment, such as zeros of an optimizer's 8-bit states, would leave holes in its
    heap, which grew to 14 GiB for a model of 70B parameters. Real steps are left as they are: mapping costs time.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 2**20)


def _data_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))


def volunteer_for_the_oom_killer() -> None:
    """Let the kernel end this case, not the sweep or its neighbours, should memory run out all the same."""
    if sys.platform == "linux" and os.access("/proc/self/oom_score_adj", os.W_OK):
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")


class TaskRequest(Data):
    """A task.

    Attributes:
        module: Where the function is.
        function: Its name; it is from text to text.
        text: Its argument.
        memory_bytes: Memory that it may take in addition to what its process has; None for all that is free.
    """

    module: str
    function: str
    text: str
    memory_bytes: int | None = None


REQUESTS: TypeAdapter[CaseRequest | TaskRequest] = TypeAdapter(CaseRequest | TaskRequest)


class Raised(Data):
    """An error; ``kind`` is its class where that is one of :mod:`actbench.errors`."""

    kind: str | None
    message: str
    trace: str
    out_of_memory: bool


class Answer(Data):
    """The result of the function, or the error that it raised."""

    text: str | None = None
    raised: Raised | None = None


def _work_task(frames: Frames, asked: TaskRequest) -> None:
    """Do a task, and answer; a SIGTERM raises in it, so that it cleans up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was stopped"))
    volunteer_for_the_oom_killer()
    limit_memory(asked.memory_bytes)
    try:
        function = getattr(importlib.import_module(asked.module), asked.function)
        answer = Answer(text=function(asked.text)).model_dump_json()
    except BaseException as error:  # whatever a model does, SystemExit too, is an answer
        answer = Answer(raised=_raised(error)).model_dump_json()
    frames.send(answer.encode())


def _raised(error: BaseException) -> Raised:
    kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__), None)
    return Raised(
        kind=kind,
        message=errors.encodable(str(error)) if kind else errors.message_of(error),
        trace=errors.encodable("".join(traceback.format_exception(error))),
        out_of_memory=any(map(errors.is_out_of_memory, _causes(error))),
    )


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, each once: foreign code may raise an error from itself."""
    found: dict[int, BaseException] = {}
    cause: BaseException | None = error
    while cause is not None and id(cause) not in found:
        found[id(cause)] = cause
        cause = cause.__cause__ if cause.__suppress_context__ else cause.__context__
    return list(found.values())
