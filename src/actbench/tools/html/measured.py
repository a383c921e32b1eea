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
from actbench.tools.html import charts
from actbench.tools.html.charts import COLOURS, Json, Picture
from actbench.tools.html.html import Beside, Details, Group, beside, texts_of
from actbench.units import format_bytes, format_seconds

KINDS = {
    "weights_bytes": ("weights", COLOURS["weights"]),
    "gradients_bytes": ("gradients", COLOURS["gradients"]),
    "optimizer_bytes": ("optimizer state", COLOURS["optimizer"]),
    "activation_bytes": ("saved for backward", COLOURS["saved"]),
    "cache_bytes": ("cache", COLOURS["packed"]),
    "engine_bytes": ("inference engine", COLOURS["engine"]),
    "batch_bytes": ("batch", COLOURS["batch"]),
    "kept_bytes": ("kept from earlier steps", COLOURS["kept"]),
    "communication_bytes": ("gathered and reduced", COLOURS["communication"]),
    "temporary_bytes": ("temporaries", COLOURS["temporary"]),
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
    records, rows = [entry.record for entry in entries], _values(entries)
    scale = charts.scale_of(max(row["peak_bytes"] for row in rows))
    timed = [row for row in rows if row["seconds"] is not None]
    wrong = [row for row in rows if row["gradient_error"] is not None]
    asked = [row for row in rows if row["largest_batch"] is not None][:MOST_BARS]
    parts = [
        part for record, row in zip(records[:MOST_BARS], rows, strict=False) for part in _parts(record, row, scale)
    ]
    timelines = [
        (row["name"], line) for record, row in zip(records, rows, strict=True) for _, line in with_timelines([record])
    ]
    limit = records[0].outcome.memory_limit_bytes if isinstance(records[0].outcome, Measurement) else None
    pictures = (
        *([charts.memory_against_time(timed, scale, limit)] if len(timed) > 1 else []),
        *([charts.error_beside_memory(wrong, scale)] if len(wrong) > 1 else []),
        *([charts.largest_batches(asked)] if len(asked) > 1 else []),
        *([charts.stacked_bars(parts, dict(KINDS.values()), scale, limit)] if parts else []),
        *charts.memory_over_steps(timelines[:MOST_TIMELINES]),
    )
    bars = f"The bars are those of the first {MOST_BARS} of {len(records)} rows."
    steps = f"The memory over a step is that of the first {MOST_TIMELINES} of {len(timelines)} rows that have it."
    has_parts = any(isinstance(record.outcome, Measurement) and record.outcome.peak_parts for record in records)
    remarks = {
        bars: len(records) > MOST_BARS,
        steps: len(timelines) > MOST_TIMELINES,
        "No step was timed here, so there is no frontier of memory against time.": not timed,
        "These records do not say what the peak is made of.": not has_parts,
    }
    return pictures, tuple(remark for remark, is_said in remarks.items() if is_said)


def _values(entries: Sequence[Entry]) -> list[Json]:
    """Return the values that charts draw, a row for each entry, each with a name that no other has."""
    rows, taken = list(map(_row, entries)), set[str]()
    for row in rows:
        scheme = row["scheme"]
        numbered = (f"{scheme} ({n})" for n in range(2, len(rows) + 2))
        row["name"] = next(name for name in (scheme, f"{scheme} ({row['meter']})", *numbered) if name not in taken)
        taken.add(row["name"])
    for meter in {row["meter"] for row in rows}:
        rivals = [row for row in rows if row["meter"] == meter and row["seconds"] is not None and row["fits"]]
        costs = [(row["peak_bytes"], row["seconds"]) for row in rivals]
        for row, is_best in zip(rivals, unbeaten(costs), strict=True):
            row["frontier"] = is_best
    return rows


def _row(entry: Entry) -> Json:
    record, measured = entry.record, entry.record.outcome
    assert isinstance(measured, Measurement)
    time, over, error = step_time_of(record), over_limit_bytes(record), measured.gradient_error
    source = "estimated" if time is not None and time.is_estimated else "measured"
    return {
        "scheme": plain(record.label or record.case.scheme),
        "meter": record.case.meter,
        "source": source,
        "peak_bytes": measured.peak_bytes,
        "largest_batch": measured.largest_batch,
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


def _parts(record: MeasuredRecord, row: Json, scale: charts.Scale) -> Iterator[Json]:
    """Yield one value for each kind of memory that a row has at its peak."""
    parts = getattr(record.outcome, "peak_parts", None)
    if isinstance(parts, PeakParts):
        for order, (field, (kind, _)) in enumerate(KINDS.items()):
            if held := getattr(parts, field):
                shown = {"drawn": held / scale.factor, "text": format_bytes(held), "peak_text": row["peak_text"]}
                yield {"name": row["name"], "kind": kind, "order": order, "bytes": held, **shown}
