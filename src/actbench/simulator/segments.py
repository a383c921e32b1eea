"""Parts of a step between two moments: what is alive in them, and how long they take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from actbench.measuring.meters.peak import Event


class Place(NamedTuple):
    """A moment: how many events and operators there were."""

    events: int
    done: int


class Part(NamedTuple):
    """What is alive at the beginning of a part of a step, at most, and at its end; and how long it takes."""

    first_bytes: int
    peak_bytes: int
    last_bytes: int
    seconds: float


def parts_between(
    places: Sequence[Place], events: Sequence[Event], passed: Sequence[float], state_bytes: int
) -> list[Part]:
    """Return what is held and taken between each two places in a row; times are 0 if none is estimated."""
    held: dict[int, int] = {}
    live, at, parts = state_bytes, 0, list[Part]()
    for begun, ended in itertools.pairwise([Place(0, 0), *places]):
        first = peak = live
        for name, amount in events[at : ended.events]:
            live += amount - held.get(name, 0)
            held[name] = amount
            peak = max(peak, live)
        at = ended.events
        seconds = _until(passed, ended.done) - _until(passed, begun.done)
        parts.append(Part(first, peak, live, max(seconds, 0.0)))
    return parts[1:]


def _until(passed: Sequence[float], done: int) -> float:
    return passed[done - 1] if passed and done else 0.0
