"""The events of one whole step, joined from the parts that the simulated meter runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from actbench.measuring.meters import watch
from actbench.measuring.meters.peak import Event, Moments, alive
from actbench.measuring.meters.stepevents import HostEvent, Origin, StepEvents
from actbench.measuring.meters.tracker import StorageTracker
from actbench.measuring.meters.watch import Owned, Watch
from actbench.nn import savedtensors
from actbench.results.timeline import OPTIMIZER, Kind

_STATE = -1
"""Name of the optimizer state that the passes ran without, if its storages do not add up to its bytes."""


@dataclass(frozen=True)
class Parts:
    """The places of the parts of a step among the events of a tracker.

    Attributes:
        moments: The moments of the forward and backward pass.
        repeating: Number of events before the optimizer's second step, the one that counts.
        made: Bytes of optimizer state that did not exist during the forward and backward pass.
        peak_at: Number of events before the peak.
        kinds: The kinds of storages.
        made_on_host: The range, end excluded, of the tracker's events in host memory that belong to the first step of
            the optimizer.
    """

    moments: Moments
    repeating: int
    made: int
    peak_at: int
    kinds: Mapping[int, Kind]
    made_on_host: tuple[int, int]


def packed_names(tracker: StorageTracker) -> Set[int]:
    """Return the names of storages that now hold packed parts."""
    return tracker.names_of(savedtensors.packed_storages())


def own(seen: Watch, tracker: StorageTracker, owned: Owned) -> None:
    """Note the origins of tensors; a gradient keeps the operator that made it."""
    for origin, tensors in reversed(owned):  # the first origin of a storage counts
        for name in tracker.names(tensors):
            made = seen.origins.get(name)
            known = origin.operator == "gradient" and made is not None
            seen.origins[name] = replace(origin, operator=made.operator) if known and made else origin


def own_before(seen: Watch, tracker: StorageTracker) -> None:
    """Note the holders of storages from before the step."""
    for held in watch.before(seen.step):
        for name in tracker.names_of([held.storage]):
            seen.origins[name] = held.origin


def whole_step(tracker: StorageTracker, parts: Parts, seen: Watch) -> StepEvents:
    """Return the events of a step in the steady state: its passes, with optimizer state alive, and the update."""
    events, moments = tracker.events, parts.moments
    at_end, at_update = alive(events[: moments.updating]), alive(events[: parts.repeating])
    state = {name: amount for name, amount in at_update.items() if name not in at_end}
    origins, kinds = dict(seen.origins), dict(parts.kinds)
    kinds.update((name, "optimizer") for name in state)
    if sum(state.values()) != parts.made:
        state, kinds[_STATE] = {_STATE: parts.made} if parts.made else {}, "optimizer"
        origins[_STATE] = Origin(OPTIMIZER, f"{seen.step.optimizer_class} state")
    before = [*alive(events[: moments.begun]).items(), *state.items()]
    taken = events[moments.begun : moments.updating]
    turned = list(_between(alive([*before, *taken]), at_update))
    shift = len(before) - moments.begun
    later = shift + moments.updating + len(turned) - parts.repeating

    def place(at: int) -> int:
        return at + (shift if at <= moments.updating else later)

    spans = [each for start, end in moments.forwards for each in (("forward", place(start)), ("backward", place(end)))]
    return StepEvents(
        events=[*before, *taken, *turned, *events[parts.repeating :]],
        before=len(before),
        peak_at=place(parts.peak_at),
        spans=[*spans, ("optimizer", place(moments.updating))],  # type: ignore[list-item]
        kinds=kinds,
        origins=origins,
        host=list(_on_host(tracker.host, parts, place)),
    )


def _between(first: Mapping[int, int], then: Mapping[int, int]) -> Sequence[Event]:
    """Return events that turn one set of storages into another; frees come first."""
    freed = [(name, 0) for name in first if name not in then]
    changed = [(name, amount) for name, amount in then.items() if first.get(name, 0) != amount]
    return [*freed, *sorted(changed, key=lambda event: event[1] - first.get(event[0], 0))]


def _on_host(host: Sequence[HostEvent], parts: Parts, place: Callable[[int], int]) -> Iterator[HostEvent]:
    """Yield the events in host memory; what the first update put there is there from the beginning of the step."""
    first, last = parts.made_on_host
    begun = parts.moments.begun
    for name, amount in alive((event.name, event.amount) for event in host[first:last]).items():
        yield HostEvent(place(begun), name, amount)
    for event in (*host[:first], *host[last:]):
        yield replace(event, at=place(max(event.at, begun)))
