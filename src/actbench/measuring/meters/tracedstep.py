"""The moments of a step in a trace of an allocator, and the kind of each storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from actbench.measuring.meters import footprint, watch as watching
from actbench.measuring.meters.peak import Event, Moments
from actbench.measuring.meters.stepevents import Origin, StepEvents
from actbench.measuring.meters.trace import STATE_ON_HOST, UNSEEN, AllocationTrace
from actbench.model.ledger import OUTSIDE
from actbench.model.measured import PeakParts
from actbench.model.timeline import OPTIMIZER, OTHER, Kind
from actbench.ops import hostmemory
from actbench.packing import savedtensors
from actbench.scheme.setup import TrainStep

_FIRST_HELD = STATE_ON_HOST - 1
"""Names of storages from before the trace count down from here."""

Found = list[tuple[Origin, set[int]]]
"""Origins with the addresses of their storages."""


@dataclass(frozen=True)
class Held:
    """A storage from before a step, by its bytes alone, so that this does not keep it alive."""

    kind: Kind
    origin: Origin
    amount: int
    device: str


def held_before(step: TrainStep) -> list[Held]:
    """Return the storages alive before a step."""
    found = watching.before(step)
    return [Held(each.kind, each.origin, each.storage.nbytes(), each.storage.device.type) for each in found]


def parts_of(held: Sequence[Held]) -> PeakParts:
    """Return the sums of the storages alive before a step."""
    sums = Counter[str]()
    for each in held:
        sums[each.kind] += each.amount
    return PeakParts(
        weights_bytes=sums["weights"],
        gradients_bytes=sums["gradients"],
        optimizer_bytes=sums["optimizer"],
        batch_bytes=sums["batch"],
    )


class TracedStep:
    """Marks the moments of a step while it runs inside a trace; results are known after the trace."""

    def __init__(self, trace: AllocationTrace, step: TrainStep) -> None:
        self._trace = trace
        self._step = step
        self._turns: list[str] = []
        self._packed: list[set[int]] = []
        self._cached: list[set[int]] = []
        self._gradients: Found = []
        self._state: Found = []
        self._host: list[tuple[str, int]] = []

    def begin(self) -> None:
        """Mark the beginning of the step."""
        self._mark("begin")

    def turn(self) -> None:
        """Mark the beginning or the end of a forward pass."""
        packed = (storage for storage in savedtensors.packed_storages() if storage.device.type != "meta")
        self._packed.append({storage.data_ptr() for storage in packed})
        self._turns.append(f"forward {len(self._turns)}")
        self._mark(self._turns[-1])

    def cache(self, tensors: list[Tensor]) -> None:
        """Mark the end of a pass that fills a cache, and note the cache."""
        self._mark(f"cache {len(self._cached)}")
        self._cached.append(footprint.addresses(tensors))

    def backward(self) -> None:
        """Mark the end of the backward pass, and note the gradients."""
        self._gradients = _addresses(watching.gradients(self._step))
        self._mark("backward")

    def end(self) -> None:
        """Mark the end of the step, and note the optimizer state."""
        self._mark("end")
        self._state = _addresses(watching.state(self._step))

    def _mark(self, name: str) -> None:
        self._host.append((name, hostmemory.noted_bytes()))
        self._trace.mark(name)

    @property
    def host(self) -> list[tuple[int, int]]:
        """Numbers of events, and bytes in host memory then, at the beginning and end of the parts of the step."""
        return [(self._trace.events_until(mark), amount) for mark, amount in self._host]

    @property
    def peak_at(self) -> int:
        """Number of events before the peak."""
        return self._trace.peak_at("begin", "end")

    @cached_property
    def moments(self) -> Moments:
        """The places of the parts of the step among the events."""
        until = self._trace.events_until
        ends = list(map(until, self._turns))
        return Moments(until("begin"), [*zip(ends[::2], ends[1::2], strict=True)], until("backward"))

    @cached_property
    def kinds(self) -> dict[int, Kind]:
        """The kinds of storages; weights and the batch are older than the trace."""
        names = self._trace.names
        state = {address for _, addresses in self._state for address in addresses}
        gradients = {address for _, addresses in self._gradients for address in addresses}
        packed = (names(mark, found) for mark, found in zip(self._turns, self._packed, strict=True))
        return self.moments.kinds(
            self._trace.events,
            weights=set(),
            state=names("begin", state) | names("end", state),
            gradients=names("backward", gradients),
            packed=set().union(*packed),
            cached=set().union(*(names(f"cache {place}", each) for place, each in enumerate(self._cached))),
        )

    def events(self, held: Sequence[Held], unseen_bytes: int = 0) -> StepEvents:
        """Return the events, after allocations of the ``held`` storages and of ``unseen_bytes`` of unknown holders."""
        first = [(_FIRST_HELD - place, each.amount) for place, each in enumerate(held)]
        names = [name for name, _ in first]
        if unseen_bytes:
            first.append((UNSEEN, unseen_bytes))
        seen = [(name, amount + unseen_bytes * (name == UNSEEN)) for name, amount in self._trace.events]
        shift, last = len(first), self._trace.events_until("end")
        moments = self.moments
        turns = [each for start, end in moments.forwards for each in (("forward", start), ("backward", end))]
        return StepEvents(
            events=[*first, *seen[:last]],
            before=shift + moments.begun,
            peak_at=shift + self.peak_at,
            spans=[(phase, shift + at) for phase, at in (*turns, ("optimizer", moments.updating))],  # type: ignore[misc]
            kinds={
                **self.kinds,
                UNSEEN: "batch",
                **{name: each.kind for name, each in zip(names, held, strict=True)},
            },
            origins={
                **self._origins(seen),
                UNSEEN: Origin(OTHER, "allocated before the step"),
                **{name: each.origin for name, each in zip(names, held, strict=True)},
            },
        )

    def _origins(self, events: Sequence[Event]) -> Mapping[int, Origin]:
        """Return the origins of storages; the optimizer is the origin of those that no module made after backward."""
        origins = dict(self._trace.origins)
        updating = self.moments.updating
        for name in {name for name, _ in events[updating:]} - {name for name, _ in events[:updating]}:
            if name in origins and origins[name].module == OUTSIDE:
                origins[name] = replace(origins[name], module=OPTIMIZER)
        for mark, found in (("backward", self._gradients), ("begin", self._state), ("end", self._state)):
            for origin, addresses in reversed(found):  # the first origin of a storage counts
                for name in self._trace.names(mark, addresses):
                    made = origins.get(name, origin).operator if mark == "backward" else origin.operator
                    origins[name] = Origin(origin.module, made)
        return origins


def _addresses(owned: watching.Owned) -> Found:
    return [(origin, footprint.addresses(tensors)) for origin, tensors in owned]
