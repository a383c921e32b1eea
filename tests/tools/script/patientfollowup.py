"""``actbench.tools.script.followup`` with time for all answers, and a search for the largest batch of one trial."""

from __future__ import annotations

from collections.abc import Callable

from actbench.model.measured import LargestBatch, Measurement
from actbench.tools.script import followup
from actbench.tools.script.trials import Finish, Forked

TRIED = 8192


def one_trial(
    run: Callable[[int, Finish], Measurement],
    own: Measurement,
    limit: int,
    tried: Callable[[int, bool], object],
    seconds_left: Callable[[], float | None],
) -> LargestBatch:
    found = Forked(lambda finish: run(TRIED, finish)).outcome()
    assert isinstance(found, Measurement)
    tried(TRIED, found.fits)
    return LargestBatch(
        batch_size=TRIED, predicted=None, memory_limit_bytes=limit, fits_peak_bytes=found.peak_bytes, trials=1
    )


vars(followup).update(WORTH_SECONDS=600.0, largest_batch=one_trial)
Session, failure_of = followup.Session, followup.failure_of
