"""The largest batch of a script: each trial runs the whole script, in a process forked before any has run."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from pydantic import TypeAdapter

from actbench.errors import ActbenchError, CodeError, MeasurementError, is_users
from actbench.measuring import search
from actbench.measuring.failures import failure_of
from actbench.measuring.search import BatchTrial
from actbench.model.measured import LargestBatch, Measurement, Outcome
from actbench.model.records import Failure
from actbench.units import format_seconds

_OUTCOME: TypeAdapter[Measurement | Failure] = TypeAdapter(Outcome)

_FEW = 8
"""Rows of the first trial of a search where the script's are unknown."""

_RESERVING = ("evaluation", "generation", "load", "resume")
"""Parts of a whole run for which the allocator may have taken more than its steps need: a trial has steps alone."""

_ANSWER_SECONDS = 1.0
"""Time for the answer of a process that has ended its work."""

Finish = Callable[[Measurement | Failure], NoReturn]
"""Answers and ends the process, whatever runs in it; any thread may call it."""


class Forked:
    """A function that runs in a process of its own, forked now.

    What runs a script leaves its modules, threads and hooks behind; so the next one begins where this one began. And a
    script that catches everything, and goes on when its run has ended, can be left.
    """

    def __init__(self, run: Callable[[Finish], Measurement]) -> None:
        self._began = time.monotonic()
        self._receiving, sending = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            gc.freeze()  # or each search for garbage, of which a step has one, goes through all that was imported
            os.close(self._receiving)
            _answer(run, sending)
        os.close(sending)

    def outcome(self, seconds: float | None = None) -> Measurement | Failure:
        """Return what the function returns, or the failure of what it raises, or that of its time after ``seconds``."""
        until = None if seconds is None else self._began + seconds
        if until is not None and until < time.monotonic():  # it may have more to say than a pipe holds
            until = time.monotonic() + _ANSWER_SECONDS
        text = _received(self._receiving, until)
        if text is None:
            os.kill(self._child, signal.SIGKILL)
        _, status = os.waitpid(self._child, 0)
        if text is None:
            return Failure(reason="timeout", message=f"it was ended after {format_seconds(seconds or 0.0)}")
        if text:
            return _OUTCOME.validate_json(text)
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Failure(reason="crash", message=f"the script's process {how} before any step was read")


def _received(place: int, until: float | None) -> bytes | None:
    """Return all that is written to a pipe; None if its other end is still open at a moment."""
    parts: list[bytes] = []
    with os.fdopen(place, "rb", buffering=0) as answers:
        while until is None or select.select([answers], [], [], max(0.0, until - time.monotonic()))[0]:
            part = answers.read(2**20)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None


def _answer(run: Callable[[Finish], Measurement], sending: int) -> NoReturn:
    """Send an outcome and end the process: nothing of its parent's may run in it."""
    first = threading.Lock()  # who comes second waits for the end of the process: the answer is whole then

    def finish(found: Measurement | Failure) -> NoReturn:
        first.acquire()
        with os.fdopen(sending, "wb") as answers:
            answers.write(found.model_dump_json().encode())
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the script may have closed it
                stream.flush()
        os._exit(0)

    answered = [sending]

    def unmark() -> None:
        while answered:  # once: a child of a child may have another file by this number
            os.close(answered.pop())

    os.register_at_fork(after_in_child=unmark)  # else a child of the script keeps the answer open
    try:
        finish(run(finish))
    except BaseException as error:  # whatever a script does is an outcome of its trial
        _print_of_script(error)
        finish(failure_of(error))
    finally:
        os._exit(1)


def largest_batch(
    run: Callable[[int, Finish], Measurement],
    own: Measurement,
    limit_bytes: int,
    tried: Callable[[int, bool], object],
    seconds_left: Callable[[], float | None] = lambda: None,
) -> LargestBatch:
    """Return the largest batch that fits; ``run`` runs the script with batches of so many rows.

    ``own`` is the measurement of the script's own batch, with which the search begins: the peak of very few rows is
    often that of the optimizer's step, and says nothing of more rows. ``seconds_left`` is how long a trial may take.

    Raises:
        MeasurementError: A trial failed, or took too long, or no loader of the script makes batches of other sizes.
    """
    seconds: dict[int, float] = {}

    def fits(batch: int) -> BatchTrial:
        found = Forked(lambda finish: run(batch, finish)).outcome(seconds_left())
        if isinstance(found, Failure):
            if found.reason == "out-of-memory":
                tried(batch, False)
                return BatchTrial(False)
            raise MeasurementError(f"with a batch of {batch} rows: {found.message}")
        if found.estimated is not None:
            seconds[batch] = found.estimated.step_seconds
        is_within = steps_fit(found)
        tried(batch, is_within)
        return BatchTrial(is_within, found.peak_bytes, found.reserved_bytes)

    rows = own.built.batch_size if own.built else None
    known = {rows: BatchTrial(steps_fit(own), own.peak_bytes, own.reserved_bytes)} if rows else {_FEW: fits(_FEW)}
    first = next(iter(known))
    other = 2 * first if known[first].fits else max(1, first // 2)
    if other != first:
        known[other] = fits(other)
    tried_bytes = known[other].needed_bytes
    if rows and tried_bytes and any(each.part in _RESERVING for each in own.events):
        gaps = tried_bytes / (known[other].peak_bytes or tried_bytes)
        known[rows] = replace(known[rows], reserved_bytes=round(gaps * own.peak_bytes))
    needed = [(batch, trial.needed_bytes or 0) for batch, trial in known.items()]
    guess = search.predict(needed[0], needed[-1], limit_bytes)
    guess = None if guess is None else max(guess, 0)  # below 0 where not even the weights fit
    found = search.largest(fits, memory_limit_bytes=limit_bytes, predicted=guess, known=known)
    trials = found.trials + len(known) - bool(rows)
    return found.model_copy(update={"trials": trials, "estimated_step_seconds": seconds.get(found.batch_size)})


def steps_fit(found: Measurement) -> bool:
    """Return whether all steps of a run fit; its evaluations have batches of their own."""
    return found.fits and not any(each.over_limit_bytes for each in found.events if each.is_step)


def _print_of_script(error: BaseException) -> None:
    """Print the traceback of what the script raised, as far as it is in code of the user's."""
    if not isinstance(error, ActbenchError):
        traceback.print_exc()
    elif isinstance(error, CodeError) and error.__cause__ is not None:
        told = traceback.TracebackException.from_exception(error.__cause__)
        told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if is_users(frame.filename)])
        told.__cause__ = told.__context__ = None
        print("".join(told.format()), file=sys.stderr)
