"""Parts of a step between two moments: what is alive in them, and how long they take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from actbench.measuring.meters.peak import Event
from actbench.measuring.meters.stepevents import HostEvent


class Place(NamedTuple):
    """A moment: how many events, operators and events in host memory there were."""

    events: int
    done: int
    host: int = 0


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
    # the part in front of the first place only tells what is alive there, and is left out at the end
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


def on_host(name: int) -> int:
    """Return the name of a storage in host memory, which no storage on the device has."""
    return -1 - name


def events_between(begun: Place, ended: Place, events: Sequence[Event], host: Sequence[HostEvent]) -> Iterator[Event]:
    """Yield what happens between two places, on the device and in host memory, in order.

    A storage may be on both, one after the other: in host memory its name is :func:`on_host`.
    """
    at = begun.events
    for each in host[begun.host : ended.host]:
        yield from events[at : each.at]
        yield on_host(each.name), each.amount
        at = max(at, each.at)
    yield from events[at : ended.events]


def _until(passed: Sequence[float], done: int) -> float:
    return passed[done - 1] if passed and done else 0.0
