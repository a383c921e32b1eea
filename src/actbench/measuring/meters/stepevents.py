"""All allocations and frees of one step, with the kind and the origin of each storage."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from actbench.measuring.meters.modulespans import module_spans
from actbench.measuring.meters.peak import Event, alive
from actbench.model.ledger import of_blocks
from actbench.model.records import Phase
from actbench.model.timeline import (
    HOLDERS,
    KINDS,
    LINES,
    OTHER,
    POINTS,
    SAMPLED_HOLDERS,
    SAMPLES,
    Holder,
    Kind,
    SampledHolder,
    Span,
    Timeline,
)


@dataclass(frozen=True)
class Origin:
    """Who made a storage, or held it before the step; fields as in :class:`actbench.model.timeline.Holder`."""

    module: str
    operator: str
    line: str = ""

    @property
    def label(self) -> str:
        """The line, else the module, else nothing."""
        return self.line or ("" if self.module.startswith("<") else self.module)


UNKNOWN = Origin(OTHER, "unknown")

_Held = tuple[tuple[Kind, Origin], list[tuple[str, int]]]
"""What a holder is, and the module and the bytes of each of its storages."""

_Amounts = dict[int, tuple[int, int]]
"""The bytes and the storages of a holder from a sampled moment on, by the moment's place."""


@dataclass(frozen=True)
class HostEvent:
    """A storage in host memory has ``amount`` bytes from now on.

    Attributes:
        at: Number of events of the device before.
    """

    at: int
    name: int
    amount: int


@dataclass(frozen=True)
class StepEvents:
    """The events of one step, from which its memory can be replayed.

    Attributes:
        events: The events; the first ``before`` are the storages alive when the step begins.
        before: The number of these.
        peak_at: Number of events before the most bytes are alive.
        spans: The parts of the step, each with the number of events before it.
        kinds: The kinds of storages, by name; temporaries are left out.
    """

    events: Sequence[Event]
    before: int
    peak_at: int
    spans: Sequence[tuple[Phase, int]]
    kinds: Mapping[int, Kind]
    origins: Mapping[int, Origin]
    host: Sequence[HostEvent] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive."""
        return sum(alive(self.events[: self.peak_at]).values())

    def kind_of(self, name: int) -> Kind:
        """Return the kind of a storage on the device."""
        return self.kinds.get(name, "temporary")

    def origin_of(self, name: int) -> Origin:
        """Return the origin of a storage."""
        return self.origins.get(name, UNKNOWN)

    def timeline(self) -> Timeline:
        """Return the timeline for a record."""
        totals = list(self._totals())
        chosen = _chosen(totals, self.peak_at - self.before, POINTS)
        samples = _chosen(totals, self.peak_at - self.before, SAMPLES)
        held = self._held(chosen)
        return Timeline(
            peak_bytes=totals[self.peak_at - self.before],
            peak_event=self.peak_at - self.before,
            events=len(totals) - 1,
            moments=tuple(chosen),
            held_bytes={kind: tuple(held[kind]) for kind in KINDS if any(held[kind])},
            spans=tuple(Span(phase=phase, start=max(start - self.before, 0)) for phase, start in self.spans),
            holders=tuple(self._holders()),
            samples=tuple(samples),
            sampled=tuple(self._sampled(samples)),
            modules=module_spans(self._made(), [start - self.before for _, start in self.spans], len(totals) - 1),
        )

    def _made(self) -> Iterator[tuple[int, str]]:
        """Yield the number of events of the step before each storage that it makes, and the module that makes it."""
        known = {name for name, _ in self.events[: self.before]}
        for at, (name, _) in enumerate(self.events[self.before :]):
            if name not in known:
                known.add(name)
                yield at, self.origin_of(name).module

    def _totals(self) -> Iterator[int]:
        """Yield the bytes alive when the step begins, and after each of its events."""
        live, total = alive(self.events[: self.before]), 0
        total = sum(live.values())
        yield total
        for name, amount in self.events[self.before :]:
            total += amount - live.get(name, 0)
            live[name] = amount
            yield total

    def _held(self, chosen: Sequence[int]) -> dict[Kind, list[int]]:
        """Return the bytes of each kind at these moments."""
        live: dict[int, int] = {}
        sums: Counter[Kind] = Counter()
        rows: dict[Kind, list[int]] = defaultdict(list)
        moments = iter(chosen)
        moment = next(moments)
        host = _at_moments(self.host, [at + self.before for at in chosen])
        for place in range(len(self.events) + 1):
            if place == moment + self.before:
                for kind in KINDS:
                    rows[kind].append(sums[kind] if kind != "host" else next(host))
                moment = next(moments, -1)
            if place < len(self.events):
                name, amount = self.events[place]
                sums[self.kind_of(name)] += amount - live.get(name, 0)
                live[name] = amount
        return rows

    def _holders(self) -> Iterator[Holder]:
        """Yield the holders at the peak: at most as many as a record names, then the rest of each kind and line.

        The same module of several blocks is one holder.
        """
        found = [(self.kind_of(name), name, amount) for name, amount in alive(self.events[: self.peak_at]).items()]
        on_host = alive((event.name, event.amount) for event in self.host if event.at <= self.peak_at)
        found += [("host", name, amount) for name, amount in on_host.items()]
        sums: dict[tuple[Kind, Origin], list[tuple[str, int]]] = defaultdict(list)
        for kind, name, amount in found:
            origin = self.origin_of(name)
            sums[kind, replace(origin, module=of_blocks(origin.module))].append((origin.module, amount))
        ranked = sorted(sums.items(), key=lambda held: -sum(amount for _, amount in held[1]))
        for (kind, origin), parts in [*ranked[:HOLDERS], *_rest(ranked[HOLDERS:])]:
            modules = {module for module, _ in parts}
            yield Holder(
                module=modules.pop() if len(modules) == 1 else origin.module,
                kind=kind,
                operator=origin.operator,
                tensors=len(parts),
                held_bytes=sum(amount for _, amount in parts),
                line=origin.line or None,
            )

    def _sampled(self, samples: Sequence[int]) -> Iterator[SampledHolder]:
        """Yield the holders at these moments: those with the most bytes at any, then the rest of each kind and line."""
        found, modules = self._amounts(samples)
        ranked = sorted(found.items(), key=lambda held: -max(amount for amount, _ in held[1].values()))
        rest: dict[tuple[Kind, str], list[_Amounts]] = defaultdict(list)
        for (kind, origin), amounts in ranked[SAMPLED_HOLDERS:]:
            rest[kind, origin.line].append(amounts)
        most = {key: sum(max(amount for amount, _ in each.values()) for each in rest[key]) for key in rest}
        for key in rest.keys() - _named_lines(most):
            if key[1]:
                rest[key[0], ""] += rest.pop(key)
        others = (((kind, Origin(OTHER, "", line)), _summed(parts)) for (kind, line), parts in rest.items())
        for (kind, origin), amounts in [*ranked[:SAMPLED_HOLDERS], *others]:
            own = modules.get((kind, origin), ())
            yield SampledHolder(
                module=next(iter(own)) if len(own) == 1 else origin.module,
                kind=kind,
                operator=origin.operator,
                line=origin.line or None,
                readings=tuple((place, *amount) for place, amount in amounts.items()),
            )

    def _amounts(
        self, samples: Sequence[int]
    ) -> tuple[dict[tuple[Kind, Origin], _Amounts], dict[tuple[Kind, Origin], set[str]]]:
        """Return what each holder has at the moments at which that changes, and its modules: those of equal blocks."""
        places: dict[tuple[Kind, Origin], int] = {}
        known: dict[tuple[Kind, str, str, str], int] = {}  # of origins there are few, each of many storages
        modules: list[set[str]] = []
        found: list[_Amounts] = []
        held: list[int] = []
        tensors: list[int] = []
        owners: dict[int, int] = {}
        live: dict[int, int] = {}
        begun = 0
        for sample, moment in enumerate(samples):
            changed: set[int] = set()
            for name, amount in self.events[begun : moment + self.before]:
                owner = owners.get(name)
                if owner is None:
                    kind, origin = self.kind_of(name), self.origin_of(name)
                    raw = kind, origin.module, origin.operator, origin.line
                    owner = known.get(raw)
                    if owner is None:
                        key = kind, replace(origin, module=of_blocks(origin.module))
                        owner = known[raw] = places.setdefault(key, len(places))
                        if owner == len(found):
                            modules.append(set())
                            found.append({})
                            held.append(0)
                            tensors.append(0)
                        modules[owner].add(origin.module)
                    owners[name] = owner
                before = live.get(name, 0)
                held[owner] += amount - before
                tensors[owner] += bool(amount) - bool(before)
                live[name] = amount
                changed.add(owner)
            begun = moment + self.before
            for owner in changed:
                now = held[owner], tensors[owner]
                if now != next(reversed(found[owner].values()), (0, 0)):
                    found[owner][sample] = now
        shown = {key: place for key, place in places.items() if found[place]}
        return {key: found[place] for key, place in shown.items()}, {
            key: modules[place] for key, place in shown.items()
        }


def _summed(parts: Sequence[_Amounts]) -> _Amounts:
    """Return the sum of what several holders have."""
    steps: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for amounts in parts:
        before = (0, 0)
        for place, amount in amounts.items():
            steps[place][0] += amount[0] - before[0]
            steps[place][1] += amount[1] - before[1]
            before = amount
    held, tensors, found = 0, 0, {}
    for place in sorted(steps):
        held, tensors = held + steps[place][0], tensors + steps[place][1]
        found[place] = held, tensors
    return found


def _named_lines(amounts: Mapping[tuple[Kind, str], int]) -> list[tuple[Kind, str]]:
    """Return the kinds and lines of the rest that a record names, those with the most bytes first."""
    return sorted((key for key in amounts if key[1]), key=lambda key: -amounts[key])[:LINES]


def _rest(held: Sequence[_Held]) -> list[_Held]:
    """Return what small holders hold: a holder for each kind and line, and for each kind without a line."""
    sums: dict[tuple[Kind, str], list[tuple[str, int]]] = defaultdict(list)
    for (kind, origin), parts in held:
        sums[kind, origin.line] += ((OTHER, amount) for _, amount in parts)
    lines = _named_lines({key: sum(amount for _, amount in parts) for key, parts in sums.items()})
    for kind, line in [key for key in sums if key[1] and key not in lines]:
        sums[kind, ""] += sums.pop((kind, line))
    order = [*lines, *((kind, "") for kind in KINDS if (kind, "") in sums)]
    return [((kind, Origin(OTHER, "", line)), sums[kind, line]) for kind, line in order]


def _chosen(totals: Sequence[int], peak: int, most: int) -> list[int]:
    """Return at most so many moments in order: the highest of each interval, the last and the peak."""
    last = len(totals) - 1
    if last < most:
        return list(range(last + 1))
    edges = [stretch * last // (most - 1) for stretch in range(most)]
    highest = (max(range(*stretch), key=totals.__getitem__) for stretch in itertools.pairwise(edges))
    chosen = [*highest, last]
    chosen[min(bisect.bisect_right(edges, peak) - 1, most - 1)] = peak
    return chosen


def most_on_host(host: Iterable[HostEvent]) -> int:
    """Return the most bytes that are in host memory at once, from events in their order."""
    amounts: dict[int, int] = {}
    total = most = 0
    for event in host:
        total += event.amount - amounts.get(event.name, 0)
        amounts[event.name] = event.amount
        most = max(most, total)
    return most


def _at_moments(host: Iterable[HostEvent], moments: Sequence[int]) -> Iterator[int]:
    """Yield the bytes in host memory at each of these ordered moments."""
    live: dict[int, int] = {}
    waiting = iter(sorted(host, key=lambda event: event.at))
    upcoming = next(waiting, None)
    for moment in moments:
        while upcoming is not None and upcoming.at <= moment:
            live[upcoming.name] = upcoming.amount
            upcoming = next(waiting, None)
        yield sum(live.values())
