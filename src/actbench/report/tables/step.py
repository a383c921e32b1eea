"""Where the time of a step goes, by operator, and who holds the memory at its peak, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from actbench.model.advice import PHASES
from actbench.model.estimated import OTHERS, EstimatedTime
from actbench.model.ledger import display_path
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.timeline import BATCH, OPTIMIZER, OTHER, TITLES, Holder, Holds, Timeline
from actbench.report.sentences import rows_of
from actbench.report.tables.groups import told_settings, varying_settings
from actbench.report.tables.table import Table, fill
from actbench.report.tables.values import Column
from actbench.units import MIB, format_bytes

PEAK_KINDS = {
    "weights_bytes": TITLES["weights"],
    "gradients_bytes": TITLES["gradients"],
    "optimizer_bytes": TITLES["optimizer"],
    "activation_bytes": TITLES["saved"],
    "cache_bytes": TITLES["cache"],
    "engine_bytes": TITLES["engine"],
    "batch_bytes": TITLES["batch"],
    "kept_bytes": TITLES["kept"],
    "communication_bytes": TITLES["communication"],
    "temporary_bytes": TITLES["temporary"],
}
"""Titles of the parts of a peak, by field."""

DEAREST = 10
"""Most operators in a table."""

_REST, _ALL, _BESIDE = "(all others)", "step", ", parallel to the step"


@dataclass(frozen=True)
class _Operator:
    """An operator, with its seconds and calls under each scheme."""

    name: str
    seconds: Mapping[str, float]
    calls: Mapping[str, int]


def operator_tables(records: Sequence[MeasuredRecord]) -> list[Table]:
    """Return, for each simulated case, the operators that take most of the step's estimated time.

    Each scheme of a case has a column. The rows add up to the step; the rows below it run in parallel to the step.
    """
    cases: dict[str, list[tuple[MeasuredRecord, EstimatedTime]]] = {}
    for record in records:
        if isinstance(record.outcome, Measurement) and record.outcome.estimated:
            same = record.case.model_copy(update={"scheme": "exact"}).key()
            cases.setdefault(same, []).append((record, record.outcome.estimated))
    settings = varying_settings([found[0][0].case for found in cases.values()])
    return [_operator_table(*each) for each in zip(cases.values(), map(told_settings, settings), strict=True)]


def _operator_table(found: Sequence[tuple[MeasuredRecord, EstimatedTime]], settings: str) -> Table:
    case = found[0][0].case
    times = {record.case.scheme: time for record, time in found}
    within = _by_operator(times, is_beside=False)
    others = [each for each in within if each.name == OTHERS]
    within = [each for each in within if each.name != OTHERS]
    rest = {scheme: sum(each.seconds.get(scheme, 0.0) for each in within[DEAREST:] + others) for scheme in times}
    rows = [
        *within[:DEAREST],
        _Operator(_REST, rest, {}),
        _Operator(_ALL, {scheme: time.step_seconds for scheme, time in times.items()}, {}),
        *(replace(each, name=f"{each.name}{_BESIDE}") for each in _by_operator(times, is_beside=True)),
    ]
    fed = rows_of(case, found[0][0].outcome)
    batch = "" if fed is None else f", batch {fed}"
    title = f"Where the time of a step of {case.model} goes{batch}{settings}, {case.device_profile}, est."
    columns = [column for scheme in times for column in _of_scheme(scheme)]
    return fill(title, (Column("operator", "Operator", "text", lambda row: row.name), *columns), rows)


def _by_operator(times: Mapping[str, EstimatedTime], *, is_beside: bool) -> list[_Operator]:
    """Return the operators that run within the step, or beside it, the most expensive first."""
    found = {
        scheme: {each.name: each for each in time.by_operator if each.is_beside == is_beside}
        for scheme, time in times.items()
    }
    operators = [
        _Operator(
            name,
            {scheme: each[name].seconds for scheme, each in found.items() if name in each},
            {scheme: each[name].calls for scheme, each in found.items() if name in each},
        )
        for name in dict.fromkeys(name for each in found.values() for name in each)
    ]
    return sorted(operators, key=lambda each: (-max(each.seconds.values()), each.name))


def _of_scheme(scheme: str) -> tuple[Column[_Operator], ...]:
    return (
        Column(f"{scheme}_seconds", scheme, "seconds", lambda row: row.seconds.get(scheme)),
        Column(f"{scheme}_calls", f"{scheme}, calls", "count", lambda row: row.calls.get(scheme), detail=1),
    )


LARGEST = 10
"""Most holders in a table."""

_NAMES = {BATCH: "(batch)", OPTIMIZER: "(optimizer)", OTHER: "(others)"}


def display_holder(holder: Holds) -> str:
    """Return the module of a holder as users see it."""
    return _NAMES.get(holder.module) or display_path(holder.module)


def with_timelines(records: Sequence[MeasuredRecord]) -> Iterator[tuple[MeasuredRecord, Timeline]]:
    """Yield the records with a timeline, each with its timeline."""
    for record in records:
        if isinstance(record.outcome, Measurement) and record.outcome.timeline is not None:
            yield record, record.outcome.timeline


def titled_timelines(records: Sequence[MeasuredRecord], *, alone: bool = True) -> Iterator[tuple[str, Timeline]]:
    """Yield the timelines of records, each with its own title.

    Titles of pictures, which stand ``alone``, have batch, meter and device; others only as far as they differ.
    """
    found = list(with_timelines(records))
    settings = varying_settings([record.case for record, _ in found])
    batches = {rows_of(record.case, record.outcome) for record, _ in found}
    has_batch, has_meter = (alone or len(each) > 1 for each in (batches, {record.case.meter for record, _ in found}))
    for (record, timeline), varying in zip(found, settings, strict=True):
        case, rows = record.case, rows_of(record.case, record.outcome)
        batch = f", batch {rows}" if has_batch and rows is not None else ""
        device = f" {case.device_profile}" if alone and case.meter == "simulated" and case.device_profile else ""
        meter = f" ({case.meter}{device})" if has_meter else ""
        yield f"{record.label or case.scheme} on {case.model}{batch}{told_settings(varying)}{meter}", timeline


@dataclass(frozen=True)
class _Row:
    """A row of a table of holders; sums have neither kind nor operator."""

    module: str
    kind: str | None
    operator: str | None
    tensors: int
    held_bytes: int
    share: float | None
    line: str | None = None


def holders_table(title: str, timeline: Timeline, largest: int = LARGEST) -> Table:
    """Return the largest holders at the peak of a step, the rest in one row, and their sum, the peak.

    ``title`` is that of the timeline.
    """
    device = [holder for holder in timeline.holders if holder.kind != "host"]
    named = [holder for holder in device if holder.module != OTHER or holder.operator][:largest]
    rest = [holder for holder in device if holder not in named]
    rows = [
        replace(_row(display_holder(each), [each], timeline, TITLES[each.kind], each.operator), line=each.line)
        for each in named
    ]
    if rest:
        rows.append(_row("all others", rest, timeline))
    rows.append(_row("peak", device, timeline))
    return fill(f"Who holds the peak of {title}", _COLUMNS, rows, _notes(timeline))


def _row(
    module: str, holders: Sequence[Holder], timeline: Timeline, kind: str | None = None, operator: str | None = None
) -> _Row:
    held = sum(holder.held_bytes for holder in holders)
    tensors = sum(holder.tensors for holder in holders)
    return _Row(module, kind, operator, tensors, held, held / timeline.peak_bytes if timeline.peak_bytes else None)


def _notes(timeline: Timeline) -> list[str]:
    kinds: dict[str, int] = {}
    for holder in timeline.holders:
        kinds[TITLES[holder.kind]] = kinds.get(TITLES[holder.kind], 0) + holder.held_bytes
    host = kinds.pop(TITLES["host"], 0)
    ranked = sorted(kinds.items(), key=lambda each: -each[1])
    made_of = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in ranked)
    when = f"after {timeline.peak_event:,} of {timeline.events:,} allocations and frees"
    lines = [f"The peak is in the {PHASES[timeline.peak_phase]}, {when}: {made_of}."]
    if host >= MIB:
        lines.append(f"Host memory, which is no part of the peak, holds {format_bytes(host)} then.")
    return lines


_COLUMNS: tuple[Column[_Row], ...] = (
    Column("module", "Module", "text", lambda row: row.module),
    Column("line", "Line", "text", lambda row: row.line),
    Column("kind", "Kind", "text", lambda row: row.kind),
    Column("operator", "Operator", "text", lambda row: row.operator),
    Column("tensors", "Tensors", "count", lambda row: row.tensors, detail=1),
    Column("held_bytes", "Held", "bytes", lambda row: row.held_bytes),
    Column("share", "Of the peak", "share", lambda row: row.share),
)
