"""Other questions than which plan is fastest: how long a sequence, how large a batch, and which card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from actbench.model.records import Case
from actbench.report.tables.table import Table, fill
from actbench.report.tables.values import Column
from actbench.simulator import profiles
from actbench.tools.fit.cards import Cards, OnCard
from actbench.tools.fit.counts import about_crashed
from actbench.tools.fit.fitting import Fitting, Means, checked, choices_of, fitting
from actbench.tools.fit.growing import LARGEST, Axis, Grower, Largest
from actbench.tools.fit.levels import EXACT, LEVELS, Level
from actbench.tools.fit.records import Asked, FitRecord, Trained, Tried, step_seconds_of
from actbench.tools.fit.sharding import Sharded, Shardings
from actbench.units import format_bytes

_UNITS: dict[Axis, str] = {"sequence_length": "tokens", "batch_size": "rows"}
_WHAT: dict[Axis, str] = {"sequence_length": "Longest sequence", "batch_size": "Largest batch"}
_FURTHEST = {level.furthest.trained: level for level in LEVELS}  # the last of each is the furthest


@dataclass(frozen=True)
class Answer:
    """What is shown of a question.

    Attributes:
        tables: The tables.
        records: The records of what was simulated of the model itself.
        chosen: The plans in the tables, the nearest to the exact step first.
        counted: How many simulations there were.
        remarks: What else there is to say.
        is_possible: Whether something fits.
        is_whole: Whether all was tried, and nothing crashed.
        path: The results file, if one is kept.
    """

    tables: tuple[Table, ...]
    records: tuple[FitRecord, ...]
    chosen: tuple[Tried, ...]
    counted: tuple[str, ...]
    remarks: tuple[str, ...]
    is_possible: bool
    is_whole: bool
    path: Path | None


def levels_of(asked: Asked) -> Sequence[tuple[str, Level]]:
    """Return how far training may differ, nearest first, with what a table calls it."""
    if asked.exact:
        return [("exact", EXACT)]
    names: dict[Trained, str] = {"all": "any", "adapters": "adapters"}
    return [("exact", EXACT), *((names[trained], _FURTHEST[trained]) for trained in get_args(Trained))]


def largest(case: Case, axis: Axis, asked: Asked, means: Means) -> Answer:
    """Return the largest size at which a step fits, for each way of training; simulated there, and at one more.

    Args:
        case: The case of the exact step, at the size from which on others are tried.
        axis: What grows: the sequence, or the batch (in one pass: in micro-batches any batch fits if one row does).
        asked: What counts as an answer; ``max_slowdown`` is over the exact step's time at the same size.
        means: How plans are made.

    Raises:
        UsageError, ModelError, MeasurementError, StoreError: As of :func:`actbench.tools.fit.fit.fit`.
    """
    case, profile = checked(case)
    start = getattr(case, axis) or 128
    case = case.model_copy(update={axis: start})
    with fitting(f"{case.model}-{profile.name}", case, choices_of(case, asked, profile, means.schemes), means) as made:
        grower, levels = Grower(made, case, asked, axis), levels_of(asked)
        grown_at = grower.run([level for _, level in levels])
    found = [(name, grown) for (name, _), grown in zip(levels, grown_at, strict=True) if grown is not None]
    kept: list[tuple[str, Largest]] = []
    for name, grown in found:
        if not any(grown.size <= nearer.size and grown.level.furthest.trained == "all" for _, nearer in kept):
            kept.append((name, grown))
    fitting_sizes = [(name, grown) for name, grown in kept if grown.size]
    unit = _UNITS[axis]
    columns = _size_columns(axis)
    where = f"{case.model} on {profile.name}" + (f", batch {case.batch_size}" if axis != "batch_size" else "")
    notes = [f"Limit {format_bytes(grower.limit)}; at most {asked.max_slowdown:g} times the exact step's time."]
    table = fill(f"{_WHAT[axis]}: {where}", columns, fitting_sizes or kept, notes)
    remarks = [_about(name, grown, unit, grower.limit) for name, grown in kept]
    return _answer(made, (table,), [_tried(made, grown) for _, grown in fitting_sizes], remarks)


def _size_columns(axis: Axis) -> tuple[Column[tuple[str, Largest]], ...]:
    def seconds(row: tuple[str, Largest]) -> float | None:
        return step_seconds_of(row[1].measured)

    return (
        Column("training", "Training", "text", lambda row: row[0]),
        Column(axis, _WHAT[axis], "count", lambda row: row[1].size),
        Column("scheme", "Scheme", "text", lambda row: row[1].case.scheme),
        Column("need_bytes", "Need", "bytes", lambda row: row[1].need),
        Column("beyond_bytes", "Need at one more", "bytes", lambda row: row[1].beyond_bytes),
        Column("estimated_step_seconds", "Step (est.)", "seconds", seconds),
        Column("slowdown", "Time (est.)", "ratio", lambda row: row[1].slowdown),
    )


def _about(name: str, grown: Largest, unit: str, limit: int) -> str:
    """Return the sentence of one way of training."""
    if not grown.size and grown.need <= limit:
        return (
            f"{name}: not even 1 of the {unit} is fast enough: {grown.case.scheme} takes {grown.slowdown:.3g} times "
            "the exact step's time"
        )
    if not grown.size:
        return (
            f"{name}: not even 1 of the {unit} fits in {format_bytes(limit)}: {grown.case.scheme} needs "
            f"{format_bytes(grown.need)}"
        )
    said = f"{name}: {grown.size:,} {unit} fit with {grown.case.scheme} ({format_bytes(grown.need)})"
    if grown.beyond_bytes is not None:
        return f"{said}, and {grown.size + 1:,} do not: the plan of least need needs {format_bytes(grown.beyond_bytes)}"
    if grown.why_no_more:
        return f"{said}; of {grown.size + 1:,}: {grown.why_no_more}"
    return f"{said}; more was not tried" if grown.size >= LARGEST else f"{said}; no time was left to try more"


def _tried(made: Fitting, grown: Largest) -> Tried:
    record = made.store.find(grown.case)
    assert record is not None  # it was simulated
    return Tried(record, grown.measured, step_seconds_of(grown.measured) or 0.0, grown.exact_seconds)


def _answer(made: Fitting, tables: tuple[Table, ...], chosen: list[Tried], remarks: list[str]) -> Answer:
    told_first = made.budget.told if chosen or not made.budget.told else f"Nothing found yet. {made.budget.told}"
    lead = (told_first,) if told_first else ()
    first = replace(tables[0], lead=lead, notes=(*tables[0].notes, *about_crashed(made.crashed, made.path)))
    results = [f"results: {made.path}"] if made.path else []
    records = tuple({each.record.case: each.record for each in chosen}.values())
    return Answer(
        (first, *tables[1:]),
        records,
        tuple(chosen),
        tuple(made.count().said(made.path)),
        (*remarks, *results),
        bool(chosen),
        not (made.budget.told or made.crashed),
        made.path,
    )


def which_card(case: Case, asked: Asked, means: Means) -> Answer:
    """Return the cards that a step fits on, the smallest first, each with the fastest plan for each way of training.

    Args:
        case: The case of the exact step; plans are made for its device, or else for the shipped one of most memory.
        asked: What counts as an answer.
        means: How plans are made.

    Raises:
        UsageError, ModelError, MeasurementError, StoreError: As of :func:`actbench.tools.fit.fit.fit`.
    """
    case, profile = checked(case.model_copy(update={"device_profile": case.device_profile or largest_card()}))
    with fitting(f"{case.model}-cards", case, choices_of(case, asked, profile, means.schemes), means) as made:
        cards = Cards(made, case, asked)
        rows = cards.run(levels_of(asked))
    title = f"Cards on which a step fits: {case.model}, batch {case.batch_size}"
    notes = [f"Plans were made for {profile.name}, and simulated for each card; times are estimated."]
    if without := [f"{name} (the least needs {format_bytes(need)})" for name, need in cards.without.items()]:
        notes.append(f"Nothing fits within {asked.max_slowdown:g} times the exact step's time on {', '.join(without)}.")
    if cards.untried:
        notes.append(f"Not all plans could be tried in time for {', '.join(cards.untried)}.")
    table = fill(title, _CARD_COLUMNS, rows, notes)
    nothing = [] if cards.untried else ["nothing fits on any card"]
    remarks = [f"the smallest card: {rows[0].profile.name}"] if rows and not cards.untried else nothing
    return _answer(made, (table,), [each.tried for each in rows], remarks)


def over_processes(case: Case, counts: Sequence[int], asked: Asked, means: Means) -> Answer:
    """Return how a model is shared out over the fewest processes on which a step fits, with the fastest plans.

    Args:
        case: The case of the exact step of one process, which has a device for itself.
        counts: Numbers of processes to choose from.
        asked: What counts as an answer; ``max_slowdown`` is over the exact step's time with the same sharding.
        means: How plans are made.

    Raises:
        UsageError, ModelError, MeasurementError, StoreError: As of :func:`actbench.tools.fit.fit.fit`.
    """
    case, profile = checked(case)
    levels = [level for _, level in levels_of(asked) if level.furthest.trained == "all"]
    with fitting(f"{case.model}-{profile.name}", case, choices_of(case, asked, profile, means.schemes), means) as made:
        shardings = Shardings(made, case, asked)
        rows, few = list[Sharded](), list[int]()
        for count in sorted(set(counts)):
            rows = shardings.run(count, levels)
            if rows:
                break
            few.append(count)
    limit, (need, spec) = case.memory_limit_bytes or 0, shardings.least
    notes = [f"Limit {format_bytes(limit)} of each process; batch {case.batch_size} of each; times are estimated."]
    table = fill(f"Shared out: {case.model} over processes with {profile.name} each", _SHARDED_COLUMNS, rows, notes)
    numbers = ", ".join(map(str, few))
    nothing = f"nothing fits on {numbers} processes: {spec} needs {format_bytes(need)}, the least that was found"
    if not shardings.knows_least:
        nothing = f"on {numbers} processes the time ended before the least need was known"
    remarks = [nothing] if few else []
    remarks += [f"cannot be: {way}: {why}" for way, why in shardings.refused.items()]
    if shardings.left_out:
        left = ", ".join(shardings.left_out)
        remarks.append(f"estimated only with all blocks alike, because other ways promise more: {left}")
    return _answer(made, (table,), [each.tried for each in rows], remarks)


_SHARDED_COLUMNS: tuple[Column[Sharded], ...] = (
    Column("processes", "Processes", "count", lambda row: row.processes),
    Column("scheme", "Scheme", "text", lambda row: row.tried.record.case.scheme),
    Column("optimizer", "Optimizer", "text", lambda row: row.tried.record.case.optimizer),
    Column("need_bytes", "Need of each", "bytes", lambda row: row.tried.need_bytes),
    Column("estimated_step_seconds", "Step (est.)", "seconds", lambda row: row.tried.seconds),
    Column("slowdown", "Time (est.)", "ratio", lambda row: row.tried.slowdown),
    Column("samples_per_second", "Samples/s (est.)", "rate", lambda row: row.samples_per_second, "higher"),
    Column("gradient", "Gradient", "text", lambda row: row.tried.training.gradient),
)


def largest_card() -> str:
    """Return the shipped device of most memory that has figures of time."""
    return max((each for each in profiles.profiles() if each.rates), key=lambda each: each.memory_bytes).name


_CARD_COLUMNS: tuple[Column[OnCard], ...] = (
    Column("device", "Card", "text", lambda row: row.profile.name),
    Column("memory_bytes", "Memory", "bytes", lambda row: row.profile.memory_bytes),
    Column("training", "Training", "text", lambda row: row.training),
    Column("scheme", "Scheme", "text", lambda row: row.tried.record.case.scheme),
    Column("need_bytes", "Need", "bytes", lambda row: row.tried.need_bytes),
    Column("estimated_step_seconds", "Step (est.)", "seconds", lambda row: row.tried.seconds, "lower"),
    Column("slowdown", "Time (est.)", "ratio", lambda row: row.tried.slowdown),
    Column("gradient", "Gradient", "text", lambda row: row.tried.training.gradient),
)
