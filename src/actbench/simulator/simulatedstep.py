"""The events of a simulated step: passes of micro-batches, some of which run, and a whole step joined from parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from actbench.measuring.meters import footprint, watch
from actbench.measuring.meters.peak import Event, Moments, alive
from actbench.measuring.meters.stepevents import HostEvent, Origin, StepEvents
from actbench.measuring.meters.watch import Owned, Watch
from actbench.model.timeline import OPTIMIZER, Kind
from actbench.scheme.microbatches import MicroBatch
from actbench.scheme.setup import TrainStep
from actbench.simulator.cost.recorder import Recorder
from actbench.simulator.tracker import Mark, StorageTracker

_PLAIN = (int, float, str, type(None))

_STATE = -1
"""Name of the optimizer state that the passes ran without, if its storages do not add up to its bytes."""


class _Begun(NamedTuple):
    """What had happened when the passes of a micro-batch began."""

    part: MicroBatch
    mark: Mark
    done: int


class MicroPasses:
    """Notes where forward passes begin and end; its :meth:`turn` is called at each of these moments.

    Micro-batches of one shape do the same: they allocate and free as many bytes in the same order, and run the same
    operators. Where two in a row have done so, only one more runs, and what the second of them did is repeated in the
    events of the tracker and the operators of the recorder. The result is the same to the byte.

    All micro-batches run if ``all_run``, and those of a step of several processes.

    Attributes:
        replaced: Names of gradients that a later micro-batch may have replaced.
    """

    def __init__(self, step: TrainStep, tracker: StorageTracker, recorder: Recorder, *, all_run: bool) -> None:
        self._step, self._tracker, self._recorder = step, tracker, recorder
        self._all_run = all_run or step.setup.processes.mesh is not None
        self._ends: list[int] = []
        self._begun: list[_Begun] = []
        self.replaced: set[int] = set()

    def turn(self) -> None:
        """A forward pass begins or ends."""
        begins = len(self._ends) % 2 == 0
        mark = self._tracker.mark()
        self._ends.append(mark.events)
        self.replaced |= self._tracker.names(footprint.gradients(self._step))
        if begins:
            parts, waiting = self._step.micro_batches, len(self._step.waiting)
            if waiting == len(parts) - 1:
                self._begun.clear()  # a step may be run anew
            self._begun.append(_Begun(parts[-waiting - 1], mark, len(self._recorder.done)))
            if not self._all_run and len(self._begun) > 3:
                self._leave_out(*self._begun[-4:])

    def forwards(self, begun: int) -> list[tuple[int, int]]:
        """Return the beginning and the end of each forward pass since ``begun`` events."""
        passes = zip(self._ends[::2], self._ends[1::2], strict=True)
        return [forward for forward in passes if forward[0] >= begun]

    def _leave_out(self, *begun: _Begun) -> None:
        """Leave out micro-batches that would repeat what two in a row did; ``begun`` has the beginnings of these."""
        _, first, second, now = begun
        parts = [first.part, now.part, *self._step.waiting]
        times = sum(1 for _ in takewhile(lambda part: _form(part) == _form(second.part), parts)) - 2
        if times > 0 and self._did(*begun[:3]) == self._did(*begun[1:]):
            self._step.skip(times)
            self._repeat(first, second, now, times)
            self._begun.clear()  # their marks are of before

    def _did(self, before: _Begun, begun: _Begun, ended: _Begun) -> tuple[list[Any], list[Any]]:
        """Return the events and the operators of a micro-batch, with names that another has, too."""
        events = self._tracker.events[begun.mark.events : ended.mark.events]
        unnamed = _unnamed(events, begun.mark.names, before.mark.names)
        return list(unnamed), self._recorder.done[begun.done : ended.done]

    def _repeat(self, first: _Begun, second: _Begun, now: _Begun, times: int) -> None:
        self._recorder.repeat(second.done, now.done, times)
        firsts = self._tracker.repeat(first.mark, second.mark, now.mark, times)
        length = now.mark.events - second.mark.events
        start, end, later = self._ends[-3:]
        copies = [moment + length * place for place in range(times) for moment in (start, end)]
        self._ends[-3:] = [*copies, *(moment + length * times for moment in (start, end, later))]
        own = [name - second.mark.names for name in self.replaced if second.mark.names <= name < now.mark.names]
        self.replaced |= {copy + name for copy in firsts for name in own}


def _form(part: MicroBatch) -> Any:
    """Return what decides what a micro-batch does: shapes and plain values. Other values are like no others."""
    leaves, structure = tree_flatten(part.batch)
    return part.share, structure, [_leaf_form(leaf) for leaf in leaves]


def _leaf_form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.layout, leaf.shape, leaf.dtype, leaf.stride() if leaf.layout is torch.strided else ()
    return leaf if isinstance(leaf, _PLAIN) else object()


def _unnamed(events: Sequence[Event], own: int, before: int) -> Iterator[tuple[str, int, int]]:
    """Yield events with names counted from the first of this micro-batch, or of the one before."""
    for name, amount in events:
        if name >= own:
            yield "own", name - own, amount
        elif name >= before:
            yield "before", name - before, amount
        else:
            yield "older", name, amount


@dataclass(frozen=True)
class Parts:
    """The places of the parts of a step among the events of a tracker.

    Attributes:
        repeating: Number of events before the optimizer's second step, the one that counts.
        made: Bytes of optimizer state that did not exist during the forward and backward pass.
        peak_at: Number of events before the peak.
        made_on_host: The range, end excluded, of the tracker's events in host memory that belong to the first step of
            the optimizer.
    """

    moments: Moments
    repeating: int
    made: int
    peak_at: int
    kinds: Mapping[int, Kind]
    made_on_host: tuple[int, int]


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
