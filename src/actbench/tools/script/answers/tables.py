"""What the peak of a script's step is made of: by phase, by kind, by line of the script and by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from actbench.model.advice import STEP
from actbench.model.measured import Measurement, Outcome, RunEvent, RunPart
from actbench.model.records import Phase
from actbench.model.timeline import OTHER, TITLES, Holder, Timeline
from actbench.report.tables.step import LARGEST, PEAK_KINDS, display_holder
from actbench.report.tables.table import Table, fill
from actbench.report.tables.values import Column, quotient
from actbench.units import counted


def script_tables(measured: Outcome) -> Iterator[Table]:
    """Yield what is known of the peak and the time of a step, as tables; none of a case that failed."""
    if not isinstance(measured, Measurement):
        return
    if measured.events:
        yield _events_table(measured)
    if measured.phase_peaks is not None or measured.estimated is not None:
        yield _phases_table(measured)
    if measured.peak_parts is not None:
        yield _kinds_table(measured)
    if measured.timeline is not None:
        timeline = measured.timeline
        if any(holder.line for holder in timeline.holders):
            yield _holders("by the line that made them", _LINE, timeline)
        yield _holders("by module", _MODULE, timeline)


_LONGEST_NAME = 44  # so that a table of holders has all columns in 100 characters


@dataclass(frozen=True)
class _Phase:
    name: str
    peak_bytes: int | None
    seconds: float | None


def _phases_table(measured: Measurement) -> Table:
    def of(phase: Phase) -> _Phase:
        peak = getattr(measured.phase_peaks, f"{phase}_bytes", None)
        return _Phase(STEP[phase], peak, getattr(measured.estimated, f"{phase}_seconds", None))

    whole = _Phase("step", measured.peak_bytes, measured.estimated.step_seconds if measured.estimated else None)
    columns: tuple[Column[_Phase], ...] = (
        Column("phase", "Phase", "text", lambda row: row.name),
        Column("peak_bytes", "Peak", "bytes", lambda row: row.peak_bytes),
        Column("estimated_seconds", "Time, est.", "seconds", lambda row: row.seconds),
    )
    return fill("Peak and time by phase", columns, [*map(of, STEP), whole])


PARTS: Mapping[RunPart, str] = {
    "first step": "first step",
    "step": "steps after it",
    "last step": "last step of an epoch",
    "next step": "step after an evaluation",
    "resumed step": "step after a resume",
    "evaluation": "evaluation",
    "generation": "generation",
    "save": "save",
    "load": "load",
    "resume": "resume",
}
"""What parts of a run are called in tables."""


def _events_table(measured: Measurement) -> Table:
    columns: tuple[Column[RunEvent], ...] = (
        Column("part", "Part of the run", "text", lambda row: PARTS[row.part]),
        Column("line", "Line", "text", lambda row: row.line),
        Column("seen", "Seen", "count", lambda row: row.count, detail=1),
        Column("batches", "Batches", "count", lambda row: row.batches, detail=1),
        Column("peak_bytes", "Peak", "bytes", lambda row: row.peak_bytes),
        Column("reserved_bytes", "Reserved", "bytes", lambda row: row.reserved_bytes),
        Column("over_limit_bytes", "Over limit", "bytes", lambda row: row.over_limit_bytes),
    )
    return fill("What each part of the run needs", columns, measured.events)


@dataclass(frozen=True)
class _Held:
    """Some memory at the peak; ``kinds`` are those of its bytes, the largest first."""

    name: str
    held_bytes: int
    share: float | None
    kinds: str | None = None


def _columns(title: str) -> tuple[Column[_Held], ...]:
    return (
        Column("name", title, "text", lambda row: row.name),
        Column("kinds", "Kinds", "text", lambda row: row.kinds, detail=1),
        Column("held_bytes", "Held", "bytes", lambda row: row.held_bytes),
        Column("share", "Of the peak", "share", lambda row: row.share),
    )


def _kinds_table(measured: Measurement) -> Table:
    found = measured.peak_parts.model_dump() if measured.peak_parts else {}
    rows = [
        _Held(title, found[part], quotient(found[part], measured.peak_bytes))
        for part, title in PEAK_KINDS.items()
        if found[part]
    ]
    return fill("What the peak is made of", _columns("Kind"), rows)


@dataclass(frozen=True)
class _Named:
    """What names a holder: None where a record does not say it, and the words for such holders."""

    title: str
    name: Callable[[Holder], str | None]
    nameless: str


_LINE = _Named("Line", lambda holder: holder.line, "what no line made")
_MODULE = _Named(
    "Module",
    lambda holder: None if holder.module == OTHER else display_holder(holder),
    "small tensors",
)


def _holders(how: str, named: _Named, timeline: Timeline) -> Table:
    """Return the largest holders on the device at the peak, those of one name as one, and the rest in one row."""
    groups: dict[str | None, list[Holder]] = {}
    for holder in timeline.holders:
        if holder.kind != "host":
            groups.setdefault(named.name(holder), []).append(holder)
    nameless = groups.pop(None, [])
    groups = _equal_blocks(groups) if named is _MODULE else groups
    rows = [(_held(name, holders, timeline), holders) for name, holders in groups.items() if name is not None]
    rows.sort(key=lambda row: -row[0].held_bytes)
    rest = [holder for _, holders in rows[LARGEST:] for holder in holders] + nameless
    parts = [counted(len(rows) - LARGEST, f"smaller {named.title.lower()}")] if len(rows) > LARGEST else []
    parts += [named.nameless] if nameless else []
    largest = [row for row, _ in rows[:LARGEST]]
    shown = [*largest, *([_held(f"({' and '.join(parts)})", rest, timeline)] if rest else [])]
    return fill(f"The largest holders at the peak, {how}", _columns(named.title), shown)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a module's path that is a number."""


def _equal_blocks(groups: dict[str | None, list[Holder]]) -> dict[str | None, list[Holder]]:
    """Return holders by module, with one name for blocks that hold the same bytes: ``blocks.*``.

    Where blocks of one pattern hold two amounts or more, each has its numbers: ``blocks.0-3``, ``blocks.1,4``.
    """
    equal: dict[tuple[str, int], list[str]] = {}
    for name, holders in groups.items():
        if name is not None:
            pattern = _NUMBER.sub("*", name)
            equal.setdefault((pattern, sum(holder.held_bytes for holder in holders)), []).append(name)
    shared = Counter(pattern for (pattern, _), names in equal.items() if len(names) > 1)
    found: dict[str | None, list[Holder]] = {}
    for (pattern, _), names in equal.items():
        if len(names) == 1 or pattern in groups:
            found.update({name: groups[name] for name in names})
            continue
        name = pattern if shared[pattern] == 1 else _numbered(pattern, names)
        found[name] = [holder for name in names for holder in groups[name]]
    return found


def _numbered(pattern: str, names: Sequence[str]) -> str:
    """Return a pattern of names with their numbers in it, if it has one place for them; else with the first number."""
    if pattern.count("*") != 1:
        return f"{names[0]} and {len(names) - 1} more"
    numbers = sorted(int(_NUMBER.findall(name)[0]) for name in names)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return pattern.replace("*", shown)


def _held(name: str, holders: Sequence[Holder], timeline: Timeline) -> _Held:
    kinds: dict[str, int] = {}
    for holder in holders:
        kinds[TITLES[holder.kind]] = kinds.get(TITLES[holder.kind], 0) + holder.held_bytes
    total = sum(kinds.values())
    ranked = sorted(kinds, key=lambda kind: -kinds[kind])
    more = f", {len(ranked) - 1} more" if len(ranked) > 1 else ""
    shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
    return _Held(shown, total, quotient(total, timeline.peak_bytes), f"{ranked[0]}{more}")
