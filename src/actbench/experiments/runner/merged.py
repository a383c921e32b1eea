"""What the ranks of a case measured, as one: the bytes of the rank that needs most, the seconds of the slowest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from actbench.results.measured import Measurement


def measurement(found: Sequence[Measurement]) -> Measurement:
    """Return the measurement of the rank with the largest peak, with what all of them say of their own."""
    largest = max(found, key=lambda one: one.peak_bytes)
    if len(found) == 1:
        return largest
    losses = [one.loss for one in found if one.loss is not None]
    over = [one.over_limit_bytes for one in found if one.over_limit_bytes is not None]
    own = {
        "rank_peak_bytes": tuple(one.peak_bytes for one in found),
        "reserved_bytes": _most([one.reserved_bytes for one in found]),
        "process_bytes": _most([one.process_bytes for one in found]),
        "over_limit_bytes": max(over, default=None),
        "loss": statistics.fmean(losses) if losses else None,
        "warnings": tuple(dict.fromkeys(warning for one in found for warning in one.warnings)),
    }
    return largest.model_copy(update=own)


def seconds(found: Sequence[tuple[float, ...] | None]) -> tuple[float, ...] | None:
    """Return the time of each step on the slowest rank; None where a meter has no clock."""
    timed = [steps for steps in found if steps is not None]
    return tuple(map(max, zip(*timed, strict=True))) if len(timed) == len(found) else None


def _most(found: Sequence[int | None]) -> int | None:
    return max((each for each in found if each is not None), default=None)
