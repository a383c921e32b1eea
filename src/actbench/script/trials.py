"""The largest batch of a script: each trial runs the whole script, in a process forked before any has run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from pydantic import TypeAdapter

from actbench.errors import MeasurementError
from actbench.measuring import search
from actbench.measuring.failures import failure_of
from actbench.measuring.search import Trial
from actbench.results.measured import LargestBatch, Measurement, Outcome
from actbench.results.records import Failure

_OUTCOME: TypeAdapter[Measurement | Failure] = TypeAdapter(Outcome)

Run = Callable[[int], Measurement]
"""Runs the script with batches of so many rows."""


def forked(run: Callable[[], Measurement]) -> Measurement | Failure:
    """Return what a function returns in a process of its own, or the failure of what it raises.

    What runs a script leaves its modules, threads and hooks behind; so the next one begins where this one began.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        _answer(run, sending)
    os.close(sending)
    with os.fdopen(receiving, "rb") as answers:
        text = answers.read()
    _, status = os.waitpid(child, 0)
    if not text:
        raise MeasurementError(f"the process of a trial ended without an answer, with status {status}")
    return _OUTCOME.validate_json(text)


def _answer(run: Callable[[], Measurement], sending: int) -> None:
    """Send an outcome and end the process: nothing of its parent's may run in it."""
    try:
        try:
            found: Measurement | Failure = run()
        except BaseException as error:  # whatever a script does is an outcome of its trial
            found = failure_of(error)
        with os.fdopen(sending, "wb") as answers:
            answers.write(found.model_dump_json().encode())
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the script may have closed it
                stream.flush()
    finally:
        os._exit(0)


def largest_batch(run: Run, limit_bytes: int, tried: Callable[[int, bool], object]) -> LargestBatch:
    """Return the largest batch that fits.

    Raises:
        MeasurementError: A trial failed.
    """
    seconds: dict[int, float] = {}

    def fits(batch: int) -> Trial:
        found = forked(lambda: run(batch))
        if isinstance(found, Failure):
            if found.reason == "out-of-memory":
                tried(batch, False)
                return Trial(False)
            raise MeasurementError(f"with a batch of {batch} rows: {found.message}")
        if found.estimated is not None:
            seconds[batch] = found.estimated.step_seconds
        tried(batch, found.fits)
        return Trial(found.fits, found.peak_bytes, found.reserved_bytes)

    first = {batch: fits(batch) for batch in (1, 2)}
    needed = {batch: trial.needed_bytes or 0 for batch, trial in first.items()}
    guess = search.predict((1, needed[1]), (2, needed[2]), limit_bytes)
    found = search.largest(fits, memory_limit_bytes=limit_bytes, predicted=guess, known=first)
    return found.model_copy(
        update={"trials": found.trials + 2, "estimated_step_seconds": seconds.get(found.batch_size)}
    )
