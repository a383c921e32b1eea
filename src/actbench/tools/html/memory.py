"""Charts of measured cases: memory against time, the parts of the peak, and the error of the gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from actbench.model.measured import MeasuredRecord, Measurement, PeakParts
from actbench.report.advice import over_limit_bytes
from actbench.report.plain import plain
from actbench.report.render.formats import PLUS_MINUS
from actbench.report.sentences import rows_of
from actbench.report.tables.computed import step_time_of
from actbench.report.tables.entries import Entry, join
from actbench.report.tables.groups import group_of, unbeaten, what_is_measured
from actbench.report.tables.step import with_timelines
from actbench.report.tables.values import Unit, write
from actbench.tools.html import frontier
from actbench.tools.html.pictures import (
    Beside,
    Details,
    Group,
    Picture,
    Scale,
    Values,
    beside,
    byte_scale,
    stacked_bars,
    texts_of,
)
from actbench.tools.html.timeline import memory_over_steps
from actbench.units import format_bytes, format_seconds

KINDS = {
    "weights_bytes": ("weights", "#5b7fa6"),
    "gradients_bytes": ("gradients", "#dfa551"),
    "optimizer_bytes": ("optimizer state", "#8f78ad"),
    "activation_bytes": ("saved for backward", "#cf6a63"),
    "cache_bytes": ("cache", "#b9487f"),
    "batch_bytes": ("batch", "#9a9a9a"),
    "kept_bytes": ("kept from earlier steps", "#a5745a"),
    "communication_bytes": ("gathered and reduced", "#c9b458"),
    "temporary_bytes": ("temporaries", "#67a58a"),
}
"""Titles and colours of the fields of :class:`PeakParts` on the page, in the order of the stack."""

MOST_BARS = 60
MOST_TIMELINES = 12


def beside_measured(records: Sequence[MeasuredRecord]) -> Beside:
    """Return charts and details of the rows of :func:`actbench.report.tables.results_table`."""
    entries = join(records)
    return beside(groups_of(entries), entries, _details)


def _details(entry: Entry) -> Details:
    time = step_time_of(entry.record)
    seeds = {"Seeds": f"{entry.seeded.seeds}; numbers are means"} if entry.seeded.of else {}
    return Details({**texts_of(entry.record), **seeds}, is_estimated=time is not None and time.is_estimated)


def groups_of(entries: Sequence[Entry]) -> Iterator[Group]:
    """Yield a group of charts for each model, batch and device; only rows within a group can be compared."""
    found: dict[Any, list[Entry]] = {}
    for entry in entries:
        if entry.measured is not None:
            found.setdefault((_comparable(entry.record), entry.seeded.seeds), []).append(entry)
    names = [_names([entry.record for entry in rows]) for rows in found.values()]
    counts = [Counter(same) for same in zip(*names, strict=True)]
    for place, rows in enumerate(found.values()):
        yield Group(_title(names[place], counts, place), _pictures(rows), _remarks([entry.record for entry in rows]))


def _device(record: MeasuredRecord) -> str:
    """Return the device of a case, real or simulated; a simulated CPU is the CPU."""
    case = record.case
    if case.meter == "simulated":
        return case.device_profile or "a CUDA device"
    return record.machine.gpu or "a CUDA device" if case.meter == "cuda" else "cpu"


def _comparable(record: MeasuredRecord) -> Any:
    case = record.case
    limit = case.memory_limit_bytes
    return record.machine.name, what_is_measured(group_of(record)), case.batch_size, _device(record), limit, case.seed


def _names(records: Sequence[MeasuredRecord]) -> tuple[str, ...]:
    """Return the possible names of a group, the shortest first."""
    record, case = records[0], records[0].case
    rows = rows_of(case, record.outcome)
    short = f"{case.model}{'' if rows is None else f', batch {rows}'}, {_device(record)}"
    settings = ", ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in case.model_dump(exclude_defaults=True).items()
        if name not in ("model", "batch_size", "scheme", "meter", "device_profile", "script")
    )
    whole = f"{short}; {settings}" if settings else short
    return short, whole, f"{whole}; {record.machine.name}"


def _title(names: Sequence[str], counts: Sequence[Counter[str]], place: int) -> str:
    """Return the shortest name that no other group has; ``counts`` says of each kind of name how many have it."""
    for name, count in zip(names, counts, strict=True):
        if count[name] == 1:
            return plain(name)
    return plain(f"{names[-1]} ({place + 1})")


def _pictures(entries: Sequence[Entry]) -> tuple[Picture, ...]:
    records, values = [entry.record for entry in entries], _values(entries)
    scale = byte_scale(max(row["peak_bytes"] for row in values))
    timed = [row for row in values if row["seconds"] is not None]
    wrong = [row for row in values if row["gradient_error"] is not None]
    parts = _parts(records[:MOST_BARS], values, scale)
    limit = records[0].outcome.memory_limit_bytes if isinstance(records[0].outcome, Measurement) else None
    found = [
        frontier.memory_against_time(timed, scale, limit) if len(timed) > 1 else None,
        frontier.error_beside_memory(wrong, scale) if len(wrong) > 1 else None,
        stacked_bars(parts, dict(KINDS.values()), scale, limit) if parts else None,
    ]
    timelines = [
        (name, timeline)
        for record, name in zip(records, _bar_names(records), strict=True)
        for _, timeline in with_timelines([record])
    ]
    return *(picture for picture in found if picture is not None), *memory_over_steps(timelines[:MOST_TIMELINES])


def _remarks(records: Sequence[MeasuredRecord]) -> tuple[str, ...]:
    lines = []
    if len(records) > MOST_BARS:
        lines.append(f"The bars are those of the first {MOST_BARS} of {len(records)} rows.")
    if (timelines := len(list(with_timelines(records)))) > MOST_TIMELINES:
        lines.append(f"The memory over a step is that of the first {MOST_TIMELINES} of {timelines} rows that have it.")
    if not any(step_time_of(record) for record in records):
        lines.append("No step was timed here, so there is no frontier of memory against time.")
    if not any(isinstance(record.outcome, Measurement) and record.outcome.peak_parts for record in records):
        lines.append("These records do not say what the peak is made of.")
    return tuple(lines)


def _values(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the values that charts draw, a row for each entry."""
    rows, records = list(map(_row, entries)), [entry.record for entry in entries]
    for name, row in zip(_bar_names(records), rows, strict=True):
        row["name"] = name
    for meter in {record.case.meter for record in records}:
        rivals = [row for row in rows if row["meter"] == meter and row["seconds"] is not None and row["fits"]]
        costs = [(row["peak_bytes"], row["seconds"]) for row in rivals]
        for row, is_best in zip(rivals, unbeaten(costs), strict=True):
            row["frontier"] = is_best
    return rows


def _row(entry: Entry) -> dict[str, Any]:
    record, measured = entry.record, entry.record.outcome
    assert isinstance(measured, Measurement)
    time, over, error = step_time_of(record), over_limit_bytes(record), measured.gradient_error
    source = "estimated" if time is not None and time.is_estimated else "measured"
    return {
        "scheme": plain(record.label or record.case.scheme),
        "meter": record.case.meter,
        "source": source,
        "peak_bytes": measured.peak_bytes,
        "peak_text": _text(entry, "peak_bytes", "bytes") + (f", {format_bytes(over)} over the limit" if over else ""),
        "fits": measured.fits,
        "frontier": False,
        "seconds": None if time is None else time.seconds,
        "seconds_text": "" if time is None else f"{format_seconds(time.seconds)}, {source}",
        "gradient_error": error if error is not None and math.isfinite(error) else None,
        "gradient_error_text": _text(entry, "gradient_error", "number"),
    }


def _text(entry: Entry, name: str, unit: Unit) -> str:
    """Return a measured number with its deviation over the seeds of its row."""
    spread = entry.seeded.spread(name)
    return write(getattr(entry.measured, name), unit) + (f"{PLUS_MINUS}{write(spread, unit)}" if spread else "")


def _bar_names(records: Sequence[MeasuredRecord]) -> list[str]:
    """Return a name for each row: its scheme, with what distinguishes it from other rows of the same scheme."""
    names: list[str] = []
    for record in records:
        name = plain(record.label or record.case.scheme)
        for candidate in (
            name,
            f"{name} ({record.case.meter})",
            *(f"{name} ({n})" for n in range(2, len(records) + 2)),
        ):
            if candidate not in names:
                names.append(candidate)
                break
    return names


def _parts(records: Sequence[MeasuredRecord], values: Values, scale: Scale) -> list[dict[str, Any]]:
    """Return one value for each kind of memory that a row has at its peak."""
    return [
        {
            "name": row["name"],
            "kind": kind,
            "order": order,
            "bytes": getattr(parts, field),
            "drawn": getattr(parts, field) / scale.factor,
            "text": format_bytes(getattr(parts, field)),
            "peak_text": row["peak_text"],
        }
        for record, row in zip(records, values, strict=False)
        if isinstance(parts := getattr(record.outcome, "peak_parts", None), PeakParts)
        for order, (field, (kind, _)) in enumerate(KINDS.items())
        if getattr(parts, field)
    ]
