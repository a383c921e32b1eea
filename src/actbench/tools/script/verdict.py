"""Whether a script fits on its device, in sentences."""

from __future__ import annotations

from actbench.model.advice import PHASES
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import differ
from actbench.report.advice import CONTEXT_BYTES, needed_bytes
from actbench.report.sentences import rows_of
from actbench.report.tables.values import step_time
from actbench.units import GIB, counted, format_bytes, format_seconds


def verdict(record: MeasuredRecord) -> list[str]:
    """Return whether a step fits and by how much, what the allocator adds, and what a CUDA context adds.

    A failed record has no verdict.
    """
    measured = record.outcome
    if not isinstance(measured, Measurement):
        return []
    lines = [_fits(record, measured), *_reserved(measured)]
    if (seconds := step_time(measured.step_seconds)) is not None:
        lines.append(f"A step takes {format_seconds(seconds.value)}, measured.")
    if measured.largest_batch is not None:
        lines.append(f"The largest batch that fits is {measured.largest_batch}.")
    if measured.simulated == "cuda" or record.case.meter == "cuda":
        lines.append(_context(record, measured))
    return lines


def about_card(record: MeasuredRecord) -> str:
    """Return the sentence about a card that nobody named."""
    return (
        f"No --device-profile is named, so the card is assumed to be {device_of(record)}: name yours with "
        "--device-profile NAME ('actbench devices' lists them)."
    )


def about_values(record: MeasuredRecord) -> list[str]:
    """Return what a user has to know of the values that the script printed, and of where it ended."""
    measured = record.outcome
    if not isinstance(measured, Measurement):
        return []
    made_up = "Losses and other values that the script prints are made up: a simulated card computes none."
    lines = [made_up] if record.case.meter == "simulated" else []
    if measured.built is not None and measured.built.stopped_after is not None:
        steps = counted(measured.built.stopped_after, "step")
        lines.append(f"The script was stopped after {steps}; the rest of it did not run.")
    return lines


def device_of(record: MeasuredRecord) -> str:
    """Return the device that a case is measured on, or simulated for."""
    if record.case.meter == "simulated":
        return record.case.device_profile or "a CUDA device"
    return record.machine.gpu or "a CUDA device" if record.case.meter == "cuda" else f"{record.machine.name}'s memory"


def _fits(record: MeasuredRecord, measured: Measurement) -> str:
    limit, over, what = measured.memory_limit_bytes, measured.over_limit_bytes, record.case.model
    processes = record.case.script.processes if record.case.script else 1
    what += f", on the first of {processes} cards," if processes > 1 else ""
    peak = _peak(record, measured)
    if limit is None:
        return f"{what}: {peak}; how much memory {device_of(record)} has is not known."
    room = f"the {format_bytes(limit)} of {device_of(record)}"
    if record.case.memory_limit_bytes is not None:
        room = f"the limit of {format_bytes(limit)}"
    if over is None:
        left = format_bytes(max(0, limit - needed_bytes(measured)))
        fits = "barely fits" if _lacks_context(record, measured) else "fits"
        return f"{what} {fits} into {room}, with {left} to spare: {peak}."
    does_not = "may not fit" if measured.at_most else "does not fit"
    return f"{what} {does_not} into {room}: {format_bytes(over)} are missing. {peak[0].upper()}{peak[1:]}."


def _peak(record: MeasuredRecord, measured: Measurement) -> str:
    """Return which step has what peak: where steps differ, the largest."""
    rows = rows_of(record.case, measured)
    mark = "at most " if measured.at_most else "~" if measured.approximate else ""
    where = f" in the {PHASES[measured.peak_phase]}" if measured.peak_phase else ""
    peak = f"{mark}{format_bytes(measured.peak_bytes)}{where}"
    if measured.built is not None and differ(measured.built.step_peaks):
        of = "" if rows is None else f", of {counted(rows, 'row')},"
        return f"the largest step{of} has a peak of {peak}"
    step = "a step" if rows is None else f"a step, with batches of {counted(rows, 'row')},"
    return f"the peak of {step} is {peak}"


def _reserved(measured: Measurement) -> list[str]:
    reserved = measured.reserved_bytes
    if reserved is None:
        return []
    taken, peak = format_bytes(reserved), format_bytes(measured.peak_bytes)
    gaps = format_bytes(max(0, reserved - measured.peak_bytes))
    return [f"The step needs {taken}: its peak of {peak}, and {gaps} that torch's allocator loses in gaps."]


def _context(record: MeasuredRecord, measured: Measurement) -> str:
    told = f"The CUDA context of a process takes some {CONTEXT_BYTES / GIB:.1f} GiB more, not included here"
    if _lacks_context(record, measured):
        return f"{told}: the step and the context need more than the card has, so expect it to run out of memory."
    return f"{told}."


def _lacks_context(record: MeasuredRecord, measured: Measurement) -> bool:
    """Return whether a step fits into a simulated card, and no CUDA context beside it."""
    limit = measured.memory_limit_bytes
    is_whole_card = record.case.memory_limit_bytes is None and record.case.meter == "simulated"
    if limit is None or not (is_whole_card and measured.fits and measured.simulated == "cuda"):
        return False
    return needed_bytes(measured) + CONTEXT_BYTES > limit
