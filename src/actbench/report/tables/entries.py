"""Records side by side: each with the exact model's record and its estimate, and marked if no other beats it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Built
from actbench.report.sentences import rows_of
from actbench.report.tables.groups import (
    Costs,
    Group,
    group_of,
    in_order,
    scheme_places,
    stack_of,
    unbeaten,
    what_is_built,
    what_is_measured,
)
from actbench.report.tables.seeds import Seeded, over_seeds
from actbench.report.tables.values import SpreadValue, quotient, ratio, step_time, throughput


class Estimates:
    """The simulations among records; each is given with ``what``, which identifies all but the scheme."""

    def __init__(self, records: Iterable[tuple[MeasuredRecord, Any]]) -> None:
        self._found: dict[Any, list[MeasuredRecord]] = defaultdict(list)
        self._devices: dict[Any, _Devices] = {}
        for record, what in records:
            if record.case.meter == "simulated" and isinstance(record.outcome, Measurement):
                is_of_cpu = (record.outcome.simulated or record.case.device_profile) == "cpu"  # shipped, or of a file
                self._found[what, record.case.scheme, is_of_cpu].append(record)

    def of(self, record: MeasuredRecord, what: Any) -> Measurement | None:
        """Return the estimate of a measurement, or None.

        Of several simulated GPUs, take the one whose name is part of the name of the record's GPU; of several profiles
        of a CPU, the one with times.
        """
        on_cpu = record.case.meter == "cpu"
        key = (what, record.case.scheme, on_cpu)
        if record.case.meter == "simulated" or key not in self._found:
            return None
        candidates = self._found[key]
        if len(candidates) > 1 and on_cpu:
            candidates = [each for each in candidates if _estimated(_measured(each)) is not None]
        elif len(candidates) > 1:
            if key not in self._devices:
                self._devices[key] = _Devices(candidates)
            candidates = self._devices[key].named_in(record.machine.gpu or "")
        outcome = candidates[0].outcome if len(candidates) == 1 else None
        return outcome if isinstance(outcome, Measurement) else None


class _Devices:
    """Simulations of the same case on several devices, by the first word of the device."""

    def __init__(self, records: Sequence[MeasuredRecord]) -> None:
        self._by_name: dict[str, list[MeasuredRecord]] = defaultdict(list)
        for record in records:
            self._by_name[(record.case.device_profile or "cuda").partition("-")[0]].append(record)
        self._lengths = sorted(set(map(len, self._by_name)))

    def named_in(self, gpu: str) -> list[MeasuredRecord]:
        """Return the simulations whose device is part of the name of a GPU, at most two of each device."""
        gpu = gpu.lower()
        parts = {gpu[start : start + length] for length in self._lengths for start in range(len(gpu) - length + 1)}
        return [record for part in parts if part in self._by_name for record in self._by_name[part][:2]]


class Entry(NamedTuple):
    """A record with the measurements that it is compared with.

    Attributes:
        measured: Its measurement, or None if the case failed.
        exact: The measurement of the exact model in the same case on the same machine.
        exact_peak_bytes: The exact model's peak, which older records have even if the case did not fit.
        previous: The record of the stack that this one extends by one scheme; of several, the one with the least peak.
        extends: Whether there is only one such stack, and it is not the exact model: the rows form a chain.
        estimate: The simulation of the same model, scheme and batch, for a record of another meter.
        same_model: A measurement of the same model, of the exact one if there is one; it helps if this case failed.
        step: Seconds of a step.
        relative_throughput: Throughput over the exact model's. None if the two were not timed together: drift
            between two sessions is no property of a scheme.
        pareto: Whether no scheme of the same case saves more at the same speed; None if there is nothing to choose.
        estimated_speed: The estimated throughput of a simulated step over the exact model's.
        estimated_pareto: Like ``pareto``, with estimated speeds.
        seeded: The record again, with those of all seeds that it is the mean of.
    """

    record: MeasuredRecord
    measured: Measurement | None
    exact: Measurement | None
    exact_peak_bytes: int | None
    previous: MeasuredRecord | None
    extends: bool
    estimate: Measurement | None
    same_model: Measurement | None
    step: SpreadValue | None
    relative_throughput: SpreadValue | None
    pareto: bool | None
    estimated_speed: float | None
    estimated_pareto: bool | None
    seeded: Seeded

    @property
    def estimated_step(self) -> float | None:
        """Estimated seconds of a simulated step."""
        return _estimated(self.measured)

    def own(self, setting: Literal["dtype", "optimizer"]) -> str:
        """Return a setting of the case, or the model's own if the case leaves it to the model."""
        asked: str | None = getattr(self.record.case, setting)
        return asked or getattr(self.same_model, setting, None) or "the model's own"

    @property
    def built(self) -> Built | None:
        """What was built for the case; for a failed case, for another row of the same model."""
        known = self.measured or self.same_model
        return known.built if known else None

    @property
    def rows(self) -> int | None:
        """Rows of a batch; None for a script whose rows are unknown."""
        return rows_of(self.record.case, self.measured or self.same_model)

    @property
    def samples(self) -> int | None:
        """Samples of a step in all data-parallel processes; None for a script that does not show their number."""
        rows, parts = self.rows, 1
        if self.record.case.script is not None:
            parts = self.built.micro_batches or 0 if self.built else 0
        return rows * parts * (self.measured.batches if self.measured else 1) if rows and parts else None

    @property
    def throughput(self) -> SpreadValue | None:
        """Samples a second, of all processes."""
        samples = self.samples
        return None if samples is None else throughput(samples, self.step)


@dataclass(slots=True, eq=False)
class _Peers:
    """What the records of one group are compared with; ``what`` numbers the cases apart from scheme and meter."""

    what: int
    same_model: Measurement | None = None
    exact: Measurement | None = None
    exact_peak_bytes: int | None = None
    exact_step: SpreadValue | None = None


def join(
    records: Sequence[MeasuredRecord],
    schemes: Sequence[str] = (),
    part: Callable[[MeasuredRecord], Hashable] = lambda record: None,
) -> list[Entry]:
    """Return an entry for each record, in an order that depends only on the cases; for several seeds it is one.

    Comparable rows are next to each other: those of ``schemes`` in this order, and then the exact model first,
    then single schemes, then compositions. Records for which ``part`` gives different values are never one entry.
    """
    seeded = over_seeds(records, part)
    records = [each.record for each in seeded]
    numbers: dict[Group, int] = {}
    groups = [numbers.setdefault(group_of(record), len(numbers)) for record in records]
    peers = _peers(records, groups, list(numbers))
    estimates = Estimates((record, peers[group].what) for record, group in zip(records, groups, strict=True))
    order = _order(records, groups, list(numbers), schemes)
    rows = [(records[place], peers[groups[place]]) for place in order]
    steps = [step_time(found.step_seconds) if (found := _measured(record)) else None for record, _ in rows]
    speeds = [_speed(_measured(record), step, peer) for (record, peer), step in zip(rows, steps, strict=True)]
    estimated = [quotient(_estimated(peer.exact), _estimated(_measured(record))) for record, peer in rows]
    best = _best(rows, [speed.value if speed else None for speed in speeds])
    estimated_best = _best(rows, estimated)
    return [
        Entry(
            record,
            measured=_measured(record),
            exact=peer.exact,
            exact_peak_bytes=peer.exact_peak_bytes,
            previous=previous.record,
            extends=previous.is_chain,
            estimate=estimates.of(record, peer.what),
            same_model=peer.same_model,
            step=step,
            relative_throughput=speed,
            pareto=pareto,
            estimated_speed=estimated_speed,
            estimated_pareto=estimated_pareto,
            seeded=seeded[place],
        )
        for (record, peer), step, speed, pareto, estimated_speed, estimated_pareto, previous, place in zip(
            rows, steps, speeds, best, estimated, estimated_best, _previous(rows), order, strict=True
        )
    ]


def _measured(record: MeasuredRecord) -> Measurement | None:
    return record.outcome if isinstance(record.outcome, Measurement) else None


def _estimated(measured: Measurement | None) -> float | None:
    return measured.estimated.step_seconds if measured and measured.estimated else None


def _peers(records: Sequence[MeasuredRecord], groups: Sequence[int], keys: Sequence[Group]) -> list[_Peers]:
    """Return what the records of each group are compared with; ``groups`` has the index in ``keys`` for each record."""
    built = list(map(what_is_built, keys))
    numbers: dict[Any, int] = {}
    peers = [_Peers(numbers.setdefault(what_is_measured(key), len(numbers))) for key in keys]
    of_exact: dict[Any, Measurement] = {}
    of_others: dict[Any, Measurement] = {}
    for record, group in zip(records, groups, strict=True):
        measured, is_exact = _measured(record), record.case.scheme == "exact"
        if is_exact:
            peers[group].exact = measured
            peers[group].exact_peak_bytes = record.outcome.peak_bytes
        if measured:
            (of_exact if is_exact else of_others).setdefault(built[group], measured)
    same_model = of_others | of_exact
    for peer, model in zip(peers, built, strict=True):
        peer.same_model = same_model.get(model)
        peer.exact_step = step_time(peer.exact.step_seconds) if peer.exact else None
    return peers


class _Previous(NamedTuple):
    record: MeasuredRecord | None
    is_chain: bool


def _previous(rows: Sequence[tuple[MeasuredRecord, _Peers]]) -> list[_Previous]:
    """Return for each row the row of its group with all of its schemes but one; of several, the least peak."""
    stacks = {scheme: stack_of(scheme) for scheme in {record.case.scheme for record, _ in rows}}
    known = {(peers, stacks[record.case.scheme]): record for record, peers in rows}
    found: list[_Previous] = []
    for record, peers in rows:
        stack = stacks[record.case.scheme]
        shorter = dict.fromkeys(stack[:place] + stack[place + 1 :] for place in range(len(stack)))
        candidates = [known[peers, each] for each in shorter if (peers, each) in known]
        is_chain = len(candidates) == 1 and candidates[0].case.scheme != "exact"
        found.append(_Previous(min(candidates, key=_peak, default=None), is_chain))
    return found


def _peak(record: MeasuredRecord) -> float:
    peak = record.outcome.peak_bytes
    return math.inf if peak is None else peak


def _order(
    records: Sequence[MeasuredRecord], groups: Sequence[int], keys: Sequence[Group], schemes: Sequence[str]
) -> list[int]:
    """Return the indices of records, sorted by group, then by scheme."""
    number = {group: place for place, group in enumerate(in_order(keys))}
    of_group = [number[key] for key in keys]
    of_scheme = scheme_places((record.case.scheme for record in records), schemes)
    ranks = [
        of_group[group] * len(of_scheme) + of_scheme[record.case.scheme]
        for record, group in zip(records, groups, strict=True)
    ]
    return sorted(range(len(records)), key=ranks.__getitem__)


def _speed(measured: Measurement | None, step: SpreadValue | None, peers: _Peers) -> SpreadValue | None:
    """Return the throughput over that of the exact model, whose steps were interleaved with these."""
    if measured is None or step is None:
        return None
    if peers.exact is measured:
        return SpreadValue(1.0)
    if peers.exact is not None and peers.exact.timing_round == measured.timing_round:
        return ratio(peers.exact_step, step)
    return ratio(step_time(measured.exact_step_seconds), step)


def _best(rows: Sequence[tuple[MeasuredRecord, _Peers]], speeds: Sequence[float | None]) -> list[bool | None]:
    """Return for each row whether no row of its group beats it; None for a single row or one without a speed."""
    costs: dict[_Peers, dict[int, Costs]] = defaultdict(dict)
    for place, ((record, peers), speed) in enumerate(zip(rows, speeds, strict=True)):
        if speed is not None and isinstance(record.outcome, Measurement) and record.outcome.fits:
            costs[peers][place] = (record.outcome.peak_bytes, -speed)
    best: list[bool | None] = [None] * len(rows)
    for rivals in costs.values():
        if len(rivals) > 1:
            for place, mark in zip(rivals, unbeaten(list(rivals.values())), strict=True):
                best[place] = mark
    return best
