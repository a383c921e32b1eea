"""Seconds of calls: rounds in which each call runs once, so that all of them meet the same disturbances.

Before each comes something else of the same size, since what a layer finds in the caches is what its neighbours left
there: run twice in a row it would find its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

LEAST_ROUNDS = 5
_WARM_UP = 3
_WARM_UP_SHARE = 4


def interleaved(calls: Sequence[Call], between: Call, seconds: float, device: torch.device) -> list[tuple[float, ...]]:
    """Return the seconds of each run of each call.

    Args:
        calls: Run in turn, each round in the opposite order of the one before.
        between: Run before each of them, and not timed.
        seconds: Rounds are begun until so much time has passed, and at least 5, after a quarter of it to warm up.
        device: What computes; on CUDA, the time between two events.
    """
    warm = time.perf_counter() + seconds / _WARM_UP_SHARE
    for _ in range(_WARM_UP):
        _each_once(calls)
    while time.perf_counter() < warm:
        _each_once(calls)
    timed = _timed_cuda if device.type == "cuda" else _timed
    found: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(found[0]) < LEAST_ROUNDS or time.perf_counter() < end:
        order = range(len(calls)) if len(found[0]) % 2 else reversed(range(len(calls)))
        for place in order:
            between()
            found[place].append(timed(calls[place]))
    return [tuple(runs) for runs in found]


def _each_once(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed_cuda(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
