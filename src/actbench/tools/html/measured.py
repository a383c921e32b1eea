"""Charts of measured cases: memory against time, the parts of the peak, and the error of the gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from actbench.model.measured import MeasuredRecord, Measurement
from actbench.report.advice import over_limit_bytes
from actbench.report.plain import plain
from actbench.report.render.formats import PLUS_MINUS
from actbench.report.sentences import rows_of
from actbench.report.tables.computed import step_time_of
from actbench.report.tables.entries import Entry, join
from actbench.report.tables.groups import group_of, unbeaten, what_is_measured
from actbench.report.tables.step import PEAK_KINDS, with_timelines
from actbench.report.tables.values import Unit, write
from actbench.tools.html import pictures
from actbench.tools.html.charts import Picture
from actbench.tools.html.html import Beside, Details, Group, beside, texts_of
from actbench.tools.html.pictures import Row
from actbench.units import format_bytes, format_seconds

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
            case, machine = entry.record.case, entry.record.machine.name
            same = machine, case.batch_size, _device(entry.record), case.memory_limit_bytes, case.seed
            key = what_is_measured(group_of(entry.record)), entry.seeded.seeds, *same
            found.setdefault(key, []).append(entry)
    names = [_names(rows[0].record) for rows in found.values()]
    counts = [Counter(same) for same in zip(*names, strict=True)]
    for place, (rows, candidates) in enumerate(zip(found.values(), names, strict=True), 1):
        # the shortest name that no other group has
        own = (name for name, count in zip(candidates, counts, strict=True) if count[name] == 1)
        yield Group(plain(next(own, f"{candidates[-1]} ({place})")), *_drawn(rows))


def _device(record: MeasuredRecord) -> str:
    """Return the device of a case, real or simulated; a simulated CPU is the CPU."""
    case = record.case
    if case.meter == "simulated":
        return case.device_profile or "a CUDA device"
    return record.machine.gpu or "a CUDA device" if case.meter == "cuda" else "cpu"


def _names(record: MeasuredRecord) -> tuple[str, ...]:
    """Return the possible names of a group, the shortest first."""
    case, rows = record.case, rows_of(record.case, record.outcome)
    short = f"{case.model}{'' if rows is None else f', batch {rows}'}, {_device(record)}"
    named = {"model", "batch_size", "scheme", "meter", "device_profile", "script"}
    others = case.model_dump(exclude_defaults=True, exclude=named).items()
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in others)
    whole = f"{short}; {settings}" if settings else short
    return short, whole, f"{whole}; {record.machine.name}"


def _drawn(entries: Sequence[Entry]) -> tuple[tuple[Picture, ...], tuple[str, ...]]:
    """Return the charts of a group, and remarks about them."""
    records, rows = [entry.record for entry in entries], rows_drawn(entries)
    timed = [(row, row.seconds) for row in rows if row.seconds is not None]
    wrong = [(row, row.gradient_error) for row in rows if row.gradient_error is not None]
    asked = [(row.name, row.largest_batch) for row in rows if row.largest_batch is not None][:MOST_BARS]
    parted = [row for row in rows[:MOST_BARS] if row.parts]
    timelines = [
        (row.name, line) for record, row in zip(records, rows, strict=True) for _, line in with_timelines([record])
    ]
    limit = records[0].outcome.memory_limit_bytes if isinstance(records[0].outcome, Measurement) else None
    drawn = (
        *([pictures.memory_against_time(timed, limit)] if len(timed) > 1 else []),
        *([pictures.error_beside_memory(wrong)] if len(wrong) > 1 else []),
        *([pictures.largest_batches(asked)] if len(asked) > 1 else []),
        *([pictures.stacked_bars(parted, limit)] if parted else []),
        *pictures.memory_over_steps(timelines[:MOST_TIMELINES]),
    )
    bars = f"The bars are those of the first {MOST_BARS} of {len(records)} rows."
    steps = f"The memory over a step is that of the first {MOST_TIMELINES} of {len(timelines)} rows that have it."
    remarks = {
        bars: len(records) > MOST_BARS,
        steps: len(timelines) > MOST_TIMELINES,
        "No step was timed here, so there is no frontier of memory against time.": not timed,
        "These records do not say what the peak is made of.": not any(row.parts for row in rows),
    }
    return drawn, tuple(remark for remark, is_said in remarks.items() if is_said)


def rows_drawn(entries: Sequence[Entry]) -> list[Row]:
    """Return what charts draw of measured entries."""
    times, best = [step_time_of(entry.record) for entry in entries], set[int]()
    for meter in {entry.record.case.meter for entry in entries}:
        costs = {
            place: (entry.measured.peak_bytes, time.seconds)
            for place, (entry, time) in enumerate(zip(entries, times, strict=True))
            if entry.measured and entry.record.case.meter == meter and time is not None and entry.measured.fits
        }
        best |= {place for place, is_best in zip(costs, unbeaten(list(costs.values())), strict=True) if is_best}
    rows: dict[str, Row] = {}
    for place, (entry, time) in enumerate(zip(entries, times, strict=True)):
        record, measured = entry.record, entry.record.outcome
        assert isinstance(measured, Measurement)
        scheme, meter = plain(record.label or record.case.scheme), record.case.meter
        candidates = (scheme, f"{scheme} ({meter})", *(f"{scheme} ({n})" for n in range(2, len(entries) + 2)))
        name = next(each for each in candidates if each not in rows)
        over, error = over_limit_bytes(record), measured.gradient_error
        is_estimated = time is not None and time.is_estimated
        texts = {
            "peak": _text(entry, "peak_bytes", "bytes") + (f", {format_bytes(over)} over the limit" if over else ""),
            "step": f"{format_seconds(time.seconds)}, {'estimated' if is_estimated else 'measured'}" if time else "",
            "gradient error": "" if error is None else _text(entry, "gradient_error", "number"),
            "meter": meter,
        }
        held = measured.peak_parts.model_dump() if measured.peak_parts else {}
        rows[name] = Row(
            name=name,
            label="\n".join([scheme, *(f"{title}: {text}" for title, text in texts.items() if text)]),
            meter=meter,
            peak_bytes=measured.peak_bytes,
            seconds=time.seconds if time else None,
            is_estimated=is_estimated,
            is_best=place in best,
            gradient_error=error if error is not None and math.isfinite(error) else None,
            largest_batch=measured.largest_batch,
            parts={title: held[field] for field, title in PEAK_KINDS.items() if held.get(field)},
        )
    return list(rows.values())


def _text(entry: Entry, name: str, unit: Unit) -> str:
    """Return a measured number with its deviation over the seeds of its row."""
    spread = entry.seeded.spread(name)
    return write(getattr(entry.measured, name), unit) + (f"{PLUS_MINUS}{write(spread, unit)}" if spread else "")
