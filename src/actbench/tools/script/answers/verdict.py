"""Whether a script fits on its device, in sentences."""

from __future__ import annotations

from actbench.model.context import CONTEXT_BYTES
from actbench.model.measured import Growth, MeasuredRecord, Measurement, RunEvent
from actbench.model.records import differ
from actbench.report.advice import needed_bytes
from actbench.report.sentences import rows_of
from actbench.report.tables.values import step_time
from actbench.tools.script.answers.tables import PARTS
from actbench.units import counted, format_bytes, format_seconds


def verdict(record: MeasuredRecord) -> list[str]:
    """Return whether memory runs out and by how much, and what more is known of it.

    The first line is the worst that is known. A failed record has no verdict.
    """
    measured = record.outcome
    if not isinstance(measured, Measurement):
        return []
    lines = in_short(record)
    fits = [_survives(record, measured)] if measured.events else [_fits(record, measured), *_reserved(measured)]
    lines += [each for each in fits if each not in lines]
    if (seconds := step_time(measured.step_seconds)) is not None:
        lines.append(f"A step takes {format_seconds(seconds.value)}, measured.")
    if measured.simulated == "cuda" and not _is_whole_card(record):
        context = format_bytes(CONTEXT_BYTES)
        lines.append(f"The CUDA context of a process takes some {context} more: the limit is taken as it was given.")
    return lines


def in_short(record: MeasuredRecord) -> list[str]:
    """Return whether memory runs out, and by what it grows: what grows until it is full is not said to fit."""
    measured = record.outcome
    if not isinstance(measured, Measurement):
        return []
    fits = _survives(record, measured) if measured.events else _fits(record, measured)
    lines = [fits]
    if measured.growth is not None:
        grows = _grows(record, measured, measured.growth)
        lines = [fits, grows] if measured.lacks_memory or not measured.growth.is_lasting else [grows]
    if measured.built is not None and measured.built.failed is not None:
        lines.append(f"{measured.built.failed}: what it does later is not in the figures{_cut(measured)}.")
    return lines


def _cut(measured: Measurement) -> str:
    """Return that an evaluation was cut short, which a script may not expect; empty if none was."""
    cut = [each.batches for each in measured.events if each.part == "evaluation" and each.batches]
    return f"; its evaluation had a few of {cut[-1]:,} batches, which may be why" if cut else ""


def about_card(record: MeasuredRecord) -> str:
    """Return the sentence about a card that was not asked for."""
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
    if measured.built is not None and measured.built.stopped_after is not None and measured.built.failed is None:
        steps = counted(measured.built.stopped_after, "step")
        more = "--whole also runs its largest batch, its evaluations and its saves"
        if record.case.script is not None and record.case.script.whole:
            more = "what it does later is not in the figures"
        lines.append(f"The script was stopped after {steps}: {more}.")
    return lines


def device_of(record: MeasuredRecord) -> str:
    """Return the device that a case is measured on, or simulated for."""
    if record.case.meter == "simulated":
        return record.case.device_profile or "a CUDA device"
    return record.machine.gpu or "a CUDA device" if record.case.meter == "cuda" else f"{record.machine.name}'s memory"


def _fits(record: MeasuredRecord, measured: Measurement) -> str:
    limit, over, what = measured.memory_limit_bytes, measured.over_limit_bytes, _what(record)
    needs = _needs(record, measured)
    if limit is None:
        return f"{what}: {needs}; how much memory {device_of(record)} has is not known."
    left = format_bytes(over if over is not None else max(0, limit - needed_bytes(measured)))
    fits, ending = "fits", f"{left} are to spare"
    if over is None:
        ending += _ahead(measured)
    else:
        ending = f"{left} are missing"
        fits = "may not fit" if measured.at_most else "does not fit"
        if not measured.at_most and over <= CONTEXT_BYTES and _is_whole_card(record):  # contexts differ
            fits = "will probably not fit"
        if (spare := _expected_spare(measured, limit)) is not None:
            fits = "is expected to fit" if spare >= 0 else "is expected not to fit"
            ending = f"of what is expected {format_bytes(spare)} are to spare" if spare >= 0 else f"{left} are missing"
    return f"{what} {fits} {_where(record, limit)}: {needs} of {_room(record, limit)}; {ending}."


def _ahead(measured: Measurement) -> str:
    """Return what did not run and may need more, in words."""
    found = []
    if (built := measured.built) is not None and built.larger_batches is not None:
        found.append(f"later batches of its data are {built.larger_batches:.1f} times as large as those that ran")
    if built is not None and built.waiting_rows is not None:
        found.append(f"a loader that did not run makes batches of {built.waiting_rows} rows")
    return f", but {' and '.join(found)}: --whole runs them" if found else ""


def _expected_spare(measured: Measurement, limit: int) -> int | None:
    """Return what is left beside the expected bytes, below 0 if they are too many; None where none are expected."""
    expected = measured.expected_bytes
    return None if not measured.at_most or expected is None else limit - expected


def _where(record: MeasuredRecord, limit: int) -> str:
    if record.case.memory_limit_bytes is not None:
        return "within the limit"
    return f"{'into' if record.case.meter == 'cpu' else 'on'} {device_of(record)}"


def _room(record: MeasuredRecord, limit: int) -> str:
    if record.case.memory_limit_bytes is not None:
        return f"{format_bytes(limit)}"
    if _is_whole_card(record):
        return f"the {format_bytes(limit)} beside the CUDA context ({format_bytes(CONTEXT_BYTES)})"
    return f"its {format_bytes(limit)}"


def _survives(record: MeasuredRecord, measured: Measurement) -> str:
    """Return whether the whole run fits, and which of its parts needs most."""
    limit = measured.memory_limit_bytes
    worst = measured.worst
    assert worst is not None
    most = _bounded(measured, worst.needed_bytes, worst.expected_bytes, is_cut=bool(worst.batches))
    needed = f"its {named_part(worst)} needs {most}"
    if limit is None:
        return f"{_what(record)}: {needed}; how much memory {device_of(record)} has is not known."
    room = _room(record, limit)
    failing = [each for each in measured.events if each.over_limit_bytes]
    if not failing:
        left = format_bytes(max(0, limit - worst.needed_bytes))
        where = _where(record, limit)
        return f"{_what(record)} fits {where} in all parts of its run: {needed} of {room}; {left} are to spare."
    spare = _expected_spare(measured, limit)
    if spare is not None and spare >= 0:
        fits = f"{_what(record)} is expected to fit {_where(record, limit)} in all parts of its run"
        return f"{fits}: {needed} of {room}; of what is expected {format_bytes(spare)} are to spare."
    may = "may run" if measured.at_most else "runs"
    if spare is not None:
        may = "is expected to run"
        failing = [each for each in failing if (each.expected_bytes or each.needed_bytes) > limit] or failing
    first = failing[0]
    what = "" if first is worst else f"; {needed}"
    first_needs = _bounded(measured, first.needed_bytes, first.expected_bytes, is_cut=False)
    return (
        f"{_what(record)} {may} out of memory at its {named_part(first)}, which needs {first_needs}: "
        f"{format_bytes(first.over_limit_bytes or 0)} more than {room}{what}."
    )


def _bounded(measured: Measurement, needed: int, expected: int | None, *, is_cut: bool) -> str:
    """Return bytes with what is known of them: both numbers where only a real run knows a shape."""
    if not measured.at_most:
        return f"{'~' if measured.approximate or is_cut else ''}{format_bytes(needed)}"
    likely = "" if expected is None else f" (expected {format_bytes(expected)})"
    return f"at most {format_bytes(needed)}{likely}"


def named_part(event: RunEvent) -> str:
    """Return a part of a run in words, with its line."""
    of = f" of {event.batches:,} batches" if event.batches and event.part == "evaluation" else ""
    part = "largest step" if event.part == "step" else PARTS[event.part]
    return f"{part}{of}" + (f" ({event.line})" if event.line else "")


def _needs(record: MeasuredRecord, measured: Measurement) -> str:
    """Return which step needs what: where steps differ, the largest."""
    rows = rows_of(record.case, measured)
    need = f"needs {_bounded(measured, needed_bytes(measured), measured.expected_bytes, is_cut=False)}"
    if measured.peak_phase == "generation":
        return f"the script, which trains nothing, {need}"
    of = "" if rows is None else f" of {counted(rows, 'row')}"
    differs = measured.built is not None and differ(measured.built.step_peaks)
    return f"{'the largest' if differs else 'a'} step{of} {need}"


def _grows(record: MeasuredRecord, measured: Measurement, growth: Growth) -> str:
    rate, more, line = format_bytes(growth.step_bytes), growth.more_steps, growth.line
    if growth.kind == "cycle":
        made = f", made by {line}," if line else ""
        when = "until Python's collector runs, which may be steps later"
        return f"{_what(record)} leaves {rate} a step in cycles of references{made} {when}."
    full = ""
    if more is not None and measured.fits:
        before = measured.built.stopped_after if measured.built else None
        full = f", and runs out of memory after some {_rounded(more + (before or 0))} steps"
    in_what = {"graph": " the graph of", "library": ", in a library,"}.get(growth.kind or "", "")
    made = f": {growth.keeper or 'it'} keeps{in_what} what {line} makes" if line else ""
    return f"{_what(record)} grows by {rate} a step{full}{made}."


def _rounded(count: int) -> str:
    """Return a count to three digits."""
    return f"{round(count, 3 - len(str(count))):,}"


def _what(record: MeasuredRecord) -> str:
    processes = record.case.script.processes if record.case.script else 1
    return record.case.shown_model + (f", on the first of {processes} cards," if processes > 1 else "")


def _reserved(measured: Measurement) -> list[str]:
    reserved = measured.reserved_bytes
    if reserved is None:
        return []
    taken, peak = format_bytes(reserved), format_bytes(measured.peak_bytes)
    gaps = format_bytes(max(0, reserved - measured.peak_bytes))
    what = "script" if measured.peak_phase == "generation" else "step"
    return [f"The {what} needs {taken}: its peak of {peak}, and {gaps} that torch's allocator loses in gaps."]


def _is_whole_card(record: MeasuredRecord) -> bool:
    """Return whether the memory for a step is what a CUDA context leaves of a simulated card."""
    measured = record.outcome
    is_card = isinstance(measured, Measurement) and measured.simulated == "cuda"
    return is_card and record.case.memory_limit_bytes is None
