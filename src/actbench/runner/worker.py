"""What runs in the process of one case: make its session, read its memory, then time steps whenever asked."""

from __future__ import annotations

import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, Protocol

from pydantic import Field, TypeAdapter

from actbench.machine import available_memory_bytes
from actbench.records import Case, Data, Failure, Measurement
from actbench.runner.frames import Frames


class Seconds(Data):
    """Seconds of each step of one round, or None where the meter has no clock."""

    kind: Literal["timed"] = "timed"
    steps: tuple[float, ...] | None


Reply = Annotated[Measurement | Failure | Seconds, Field(discriminator="kind")]
REPLIES: TypeAdapter[Measurement | Failure | Seconds] = TypeAdapter(Reply)


class Session(Protocol):
    """One case being measured, in the process it is made in."""

    def memory(self) -> Measurement:
        """Read everything but time."""
        ...

    def time(self, steps: int) -> tuple[float, ...] | None:
        """Run one round of timed steps; the first call warms up before."""
        ...


class Bench(Protocol):
    """A module that measures cases: ``actbench.bench``, or one that a test gives in its place."""

    Session: Callable[[Case], Session]
    failure_of: Callable[[BaseException], Failure]


def work(frames: Frames, bench: Bench) -> None:
    """Measure the case that comes, and answer until the other end closes the connection.

    The case is answered with a ``Measurement``; each number of steps that follows, with ``Seconds``. An error is
    answered with a ``Failure`` and ends the work.
    """
    case = Case.model_validate_json(frames.receive())
    volunteer_for_the_oom_killer()
    if case.meter != "cuda":
        limit_memory()
    try:
        session = bench.Session(case)
        _answer(frames, session.memory())
        for steps in _requests(frames):
            _answer(frames, Seconds(steps=session.time(steps)))
    except BaseException as error:  # whatever a model does, SystemExit too, is an outcome of its case
        traceback.print_exc()
        _answer(frames, bench.failure_of(error))


def _answer(frames: Frames, reply: Measurement | Failure | Seconds) -> None:
    frames.send(reply.model_dump_json().encode())


def _requests(frames: Frames) -> Iterator[int]:
    while True:
        try:
            yield int(frames.receive())
        except EOFError:
            return


def limit_memory(most_bytes: int | None = None) -> None:
    """Turn an allocation that the machine cannot serve into an error here, before the kernel kills something for it.

    Limited is what the process may write to (data), not its address space, of which libraries reserve far more than
    they use.

    Args:
        most_bytes: What it may take beside what it has; None is all that is free.
    """
    limit = _data_bytes() + (available_memory_bytes() if most_bytes is None else most_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _data_bytes() -> int:
    if sys.platform != "linux":
        return 0
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))


def volunteer_for_the_oom_killer() -> None:
    """Should memory run out all the same, let the kernel end this case and neither the sweep nor its neighbours."""
    if sys.platform == "linux" and os.access("/proc/self/oom_score_adj", os.W_OK):
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
