"""Records side by side: each with the exact model's and the estimate of its case, marked when no other beats it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from actbench import spec
from actbench.errors import SpecError
from actbench.records import Built, Case, Measurement, Record
from actbench.tables.timing import Spread, ratio, step_time, throughput

# What an estimate and a measurement of the same thing may differ in.
_HOW_MEASURED = {
    "meter",
    "device_profile",
    "memory_limit_bytes",
    "find_largest_batch",
    "gradient_quality",
    "seed",
    "warmup_steps",
    "min_steps",
    "min_seconds",
}

_what_is_built = attrgetter("model", "task", "sequence_length", "image_size", "dtype", "optimizer", "trust_remote_code")


@dataclass(frozen=True)
class Entry:
    """A record with the measurements it is read against.

    Attributes:
        record: The record.
        exact: What the exact model measured in the same case on the same machine.
        estimate: What the simulated meter said of the same model, scheme and batch, for a record of another meter.
        same_model: A measurement of the same model, fed the same, of the exact one if there is one: a failed record
            says less.
        pareto: Whether no scheme of the same case saves more at the same speed; None where there is nothing to choose.
    """

    record: Record
    exact: Measurement | None = None
    estimate: Measurement | None = None
    same_model: Measurement | None = None
    pareto: bool | None = None

    @property
    def measured(self) -> Measurement | None:
        """The measurement, or None when the case failed."""
        return self.record.outcome if isinstance(self.record.outcome, Measurement) else None

    def own(self, setting: Literal["dtype", "optimizer"]) -> str:
        """Return a setting of the case, or where it leaves that to the model what the model brought."""
        asked: str | None = getattr(self.record.case, setting)
        return asked or getattr(self.same_model, setting, None) or "the model's own"

    @property
    def built(self) -> Built | None:
        """What the model and task of the case came to; of a failed case what they came to in another row."""
        known = self.measured or self.same_model
        return known.built if known else None

    @property
    def step(self) -> Spread | None:
        """Seconds of a step."""
        return step_time(self.measured.step_seconds) if self.measured else None

    @property
    def throughput(self) -> Spread | None:
        """Samples a second."""
        return throughput(self.record.case.batch_size, self.step)

    @property
    def relative_throughput(self) -> Spread | None:
        """Throughput over that of the exact model, which is 1 without a spread for the exact model itself.

        None where the two were not timed together: drift between two sessions is no property of a scheme.
        """
        if self.step is not None and self.exact is self.measured:
            return Spread(1.0)
        return ratio(step_time(self._exact_seconds), self.step)

    @property
    def _exact_seconds(self) -> tuple[float, ...] | None:
        """Seconds of the exact model's steps that took turns with this record's."""
        if self.measured is None:
            return None
        if self.exact is not None and self.exact.timing_round == self.measured.timing_round:
            return self.exact.step_seconds
        return self.measured.exact_step_seconds


def join(records: Sequence[Record]) -> list[Entry]:
    """Return an entry for each record, in an order that depends on the cases only, not on when they were measured.

    Rows that can be compared stand beside each other, the exact model first, then simple schemes, then composed ones.
    """
    exact = {_group(record): record.outcome for record in records if record.case.scheme == "exact"}
    estimates = _estimates(records)
    same_model = _by_model(records)
    entries = []
    for record in sorted(records, key=_order):
        against = exact.get(_group(record))
        entry = Entry(
            record,
            against if isinstance(against, Measurement) else None,
            _estimate_of(record, estimates),
            same_model.get(_what_is_built(record.case)),
        )
        entries.append(entry)
    return _with_pareto(entries)


def _machine(record: Record) -> tuple[str, str]:
    return record.machine.name, record.machine.gpu or ""


def _group(record: Record) -> tuple[str, ...]:
    """Return what the records of the schemes that can be compared have in common."""
    return (*_machine(record), record.case.model_dump_json(exclude={"scheme"}))


def _by_model(records: Sequence[Record]) -> dict[Any, Measurement]:
    """Return a measurement of each model, of the exact one where that was measured."""
    found: dict[Any, Measurement] = {}
    for record in sorted(records, key=lambda record: record.case.scheme != "exact"):
        if isinstance(record.outcome, Measurement):
            found.setdefault(_what_is_built(record.case), record.outcome)
    return found


def _what(case: Case) -> str:
    return case.model_dump_json(exclude=_HOW_MEASURED)


def _estimates(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.case.meter == "simulated" and isinstance(record.outcome, Measurement):
            found[_what(record.case)].append(record)
    return found


def _estimate_of(record: Record, estimates: dict[str, list[Record]]) -> Measurement | None:
    """Return the estimate of a measurement: that of the CPU for the CPU, that of a GPU for a GPU.

    Of several simulated GPUs it is the one that the record's GPU is named like; where none is, there is no estimate.
    """
    if record.case.meter == "simulated":
        return None
    is_cpu = record.case.meter == "cpu"
    candidates = [e for e in estimates.get(_what(record.case), ()) if (e.case.device_profile == "cpu") == is_cpu]
    if len(candidates) > 1:
        gpu = (record.machine.gpu or "").lower()
        candidates = [e for e in candidates if (e.case.device_profile or "cuda").partition("-")[0] in gpu]
    outcome = candidates[0].outcome if len(candidates) == 1 else None
    return outcome if isinstance(outcome, Measurement) else None


def _with_pareto(entries: list[Entry]) -> list[Entry]:
    groups: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.relative_throughput is not None:
            groups[_group(entry.record)].append(entry)
    marked = []
    for entry in entries:
        rivals = groups.get(_group(entry.record), [])
        if entry in rivals and len(rivals) > 1:
            entry = replace(entry, pareto=not any(_beats(rival, entry) for rival in rivals))
        marked.append(entry)
    return marked


def _beats(rival: Entry, entry: Entry) -> bool:
    """Whether a rival needs no more memory and no more time, and less of one of them."""
    theirs, ours = _cost(rival), _cost(entry)
    return theirs != ours and all(their <= our for their, our in zip(theirs, ours, strict=True))


def _cost(entry: Entry) -> tuple[float, float]:
    assert entry.measured is not None
    assert entry.relative_throughput is not None
    return entry.measured.peak_bytes, -entry.relative_throughput.value


def _order(record: Record) -> tuple[Any, ...]:
    case = record.case
    workload = _sortable(case.model_dump(exclude={"model", "batch_size", "scheme", *_HOW_MEASURED}))
    how = _sortable(case.model_dump(include=_HOW_MEASURED - {"meter"}))
    return _machine(record), case.model, workload, case.batch_size, case.meter, how, _scheme_order(case.scheme)


def _sortable(settings: dict[str, Any]) -> tuple[Any, ...]:
    """Make values of any type comparable: None first, numbers by size."""
    values = settings.values()
    return tuple((value is not None, value if isinstance(value, int | float) else 0, str(value)) for value in values)


def _scheme_order(scheme: str) -> tuple[Any, ...]:
    """Order schemes by the number of their parts, then by name, then by value as a number where it is one."""
    try:
        parts = spec.parse(scheme)
    except SpecError:
        return (2, 0, scheme)
    return (scheme != "exact", len(parts), tuple((part.name, _number(part.value), str(part)) for part in parts))


def _number(value: str | None) -> float:
    try:
        return float(value or 0)
    except ValueError:
        return 0.0
