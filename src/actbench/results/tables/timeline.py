"""Who holds the memory at the peak of a step, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actbench.results.advice import PHASES
from actbench.results.ledger import display_path
from actbench.results.measured import MeasuredRecord, Measurement
from actbench.results.tables.columns import Column
from actbench.results.tables.table import Table, fill
from actbench.results.timeline import BATCH, OPTIMIZER, OTHER, TITLES, Holder, Timeline
from actbench.units import format_bytes

LARGEST = 10
"""Most holders in a table."""

_NAMES = {BATCH: "(batch)", OPTIMIZER: "(optimizer)", OTHER: "(others)"}


def display_holder(holder: Holder) -> str:
    """Return the module of a holder as users see it."""
    return _NAMES.get(holder.module) or display_path(holder.module)


def with_timelines(records: Sequence[MeasuredRecord]) -> Iterator[tuple[MeasuredRecord, Timeline]]:
    """Yield the records with a timeline, each with its timeline."""
    for record in records:
        if isinstance(record.outcome, Measurement) and record.outcome.timeline is not None:
            yield record, record.outcome.timeline


def title_of(record: MeasuredRecord) -> str:
    """Return the title of a timeline."""
    case = record.case
    device = f" {case.device_profile}" if case.meter == "simulated" and case.device_profile else ""
    return f"{record.label or case.scheme} on {case.model}, batch {case.batch_size} ({case.meter}{device})"


@dataclass(frozen=True)
class _Row:
    """A row of a table of holders; sums have neither kind nor operator."""

    module: str
    kind: str | None
    operator: str | None
    tensors: int
    held_bytes: int
    share: float | None


def holders_table(record: MeasuredRecord, timeline: Timeline, largest: int = LARGEST) -> Table:
    """Return the largest holders at the peak of a step, the rest in one row, and their sum, the peak."""
    device = [holder for holder in timeline.holders if holder.kind != "host"]
    named = [holder for holder in device if holder.module != OTHER or holder.operator][:largest]
    rest = [holder for holder in device if holder not in named]
    rows = [_row(display_holder(each), [each], timeline, TITLES[each.kind], each.operator) for each in named]
    if rest:
        rows.append(_row("all others", rest, timeline))
    rows.append(_row("peak", device, timeline))
    return fill(f"Who holds the peak of {title_of(record)}", _COLUMNS, rows, _notes(timeline))


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
    if host:
        lines.append(f"In host memory, which is no part of it, lie {format_bytes(host)} then.")
    return lines


_COLUMNS: tuple[Column[_Row], ...] = (
    Column("module", "Module", "text", lambda row: row.module),
    Column("kind", "Kind", "text", lambda row: row.kind),
    Column("operator", "Operator", "text", lambda row: row.operator),
    Column("tensors", "Tensors", "count", lambda row: row.tensors, detail=1),
    Column("held_bytes", "Held", "bytes", lambda row: row.held_bytes),
    Column("share", "Of the peak", "share", lambda row: row.share),
)
