"""The tables of ``actbench fit``: usual stacks and below them the best plans, and the frontiers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from actbench.model.context import CONTEXT_BYTES
from actbench.model.measured import Measurement
from actbench.report.kinds import Kind
from actbench.report.sentences import failures, names_of_cases, warnings
from actbench.report.tables.estimates import about_unknown
from actbench.report.tables.table import Table, fill
from actbench.report.tables.values import Column, Curve, SpreadValue, Value, change, step_time, with_spread
from actbench.tools.fit.answer import Fitted, about_crashed, answer, fitted, numbered, times, without_limit
from actbench.tools.fit.records import FitRecord, PlannedStep, is_crash, step_seconds_of
from actbench.units import GIB, format_bytes, format_seconds

FIT_TITLE = "What fits"

_MOST_OPTIONS = 3  # plans whose row leaves out where schemes act, and below which they are written out
_ADAPTERS = "Adapters are other parameters than those of the exact step: low-rank matrices added to frozen weights."


_AT_PEAK: dict[str, str] = {
    "weights_bytes": "Weights at peak",
    "gradients_bytes": "Gradients at peak",
    "optimizer_bytes": "Optimizer state at peak",
    "activation_bytes": "Activations at peak",
    "temporary_bytes": "Temporaries at peak",
}


def _columns(found: Fitted) -> tuple[Column[PlannedStep], ...]:
    def optimizer(plan: PlannedStep) -> str:
        return plan.optimizer or f"the model's own {plan.measurement.optimizer}"

    def differs(plan: PlannedStep) -> str | None:
        others = [what for what in ("updates", "precision") if getattr(plan.training, what) == "other"]
        return ", ".join([*others, *(["adapters"] if plan.training.trained == "adapters" else [])]) or None

    def at_peak(part: str, plan: PlannedStep) -> Value:
        return getattr(plan.measurement.peak_parts, part, None)

    return (
        Column("scheme", "Scheme", "text", lambda plan: plan.spec, quiet=True),
        Column("optimizer", "Optimizer", "text", optimizer, quiet=True),
        Column("plan", "Plan", "text", lambda plan: plan.name),
        Column("need_bytes", "Need", "bytes", lambda plan: plan.need_bytes, "lower"),
        Column("fits", "Fits", "flag", found.has_room_for),
        Column("slowdown", "Time (est.)", "ratio", lambda plan: plan.slowdown, "lower"),
        Column("gradient", "Gradient", "text", lambda plan: plan.gradient),
        Column("gradient_error", "Gradient error", "number", lambda plan: plan.record.gradient_error, "lower"),
        Column("differs", "Also changes", "text", differs),
        Column("joined", "Peak from", "text", lambda plan: "joined" if plan.record.joined else None, detail=1),
        Column("estimated_step_seconds", "Step (est.)", "seconds", lambda plan: plan.seconds, "lower", detail=1),
        Column("peak_bytes", "Peak", "bytes", lambda plan: plan.peak_bytes, "lower", detail=1),
        *(Column(part, title, "bytes", partial(at_peak, part), "lower", detail=2) for part, title in _AT_PEAK.items()),
    )


class _Row(NamedTuple):
    """A plan, simulated or measured on a device; a measured one comes with its simulation."""

    name: str
    record: FitRecord
    simulated: Measurement | None = None

    @property
    def measured(self) -> Measurement | None:
        return self.record.outcome if isinstance(self.record.outcome, Measurement) else None

    @property
    def step(self) -> SpreadValue | None:
        return step_time(self.measured.step_seconds) if self.measured else None

    @property
    def estimate(self) -> float | None:
        return step_seconds_of(self.measured)

    @property
    def peak_off(self) -> float | None:
        """How much more the simulated peak is than the measured one."""
        return change(self.measured.peak_bytes, self.simulated.peak_bytes) if self.measured and self.simulated else None

    @property
    def step_off(self) -> float | None:
        """How much longer the simulated step is than the measured one."""
        return change(self.step.value, step_seconds_of(self.simulated)) if self.step else None


_PAIR_COLUMNS: tuple[Column[_Row], ...] = (
    Column("scheme", "Scheme", "text", lambda row: row.record.case.scheme, quiet=True),
    Column("optimizer", "Optimizer", "text", lambda row: row.record.case.optimizer, quiet=True),
    Column("plan", "Plan", "text", lambda row: row.name),
    Column("meter", "Meter", "text", lambda row: row.record.case.meter),
    Column("peak_bytes", "Peak", "bytes", lambda row: row.record.outcome.peak_bytes),
    Column("peak_estimate_error", "Peak off by", "change", lambda row: row.peak_off),
    *with_spread("step_seconds", "Step", "seconds", lambda row: row.step),
    Column("estimated_step_seconds", "Step", "seconds", lambda row: row.estimate, estimate_of="step_seconds"),
    Column("step_estimate_error", "Step off by", "change", lambda row: row.step_off),
    Column("failure", "Failure", "text", lambda row: getattr(row.record.outcome, "reason", None)),
)


def fit_tables(records: Sequence[FitRecord], title: str = FIT_TITLE) -> tuple[Table, ...]:
    """Return the tables of a file of fits: for each exact step, usual stacks with a shortlist, and frontiers.

    An exact step that does not fit, and for which there are no plans, comes last: plans over processes ask one process
    only for the blocks of the model.
    """
    in_order = sorted(fitted(records), key=lambda found: len(found.tried) == 1 and not found.has_room_for(found.exact))
    tables = [table for found in in_order for table in tables_of(found, title)]
    first, *others = tables or [fill(title, (), [])]
    lost = about_crashed({each.case: each.outcome for each in records if is_crash(each.outcome)}, None)
    return (replace(first, lead=(*first.lead, *lost)), *others)


def tables_of(found: Fitted, title: str, verdict: Sequence[str] = ()) -> tuple[Table, ...]:
    """Return the tables of the plans that were simulated for one exact step.

    ``verdict`` stands above them in place of what they say themselves.
    """
    rows = "" if found.case.rows is None else f"batch {found.case.rows}, "
    about = f"{found.case.model}, {rows}on {found.case.device_profile}"
    shown = list(dict.fromkeys([*found.usual(), *found.listed()]))
    if not found.fits:
        title = "No simulated plan fits; what needs least"
        if any(map(found.has_room_for, found.listed())):
            title = f"Fits only at more than {times(found.max_slowdown)} the exact step's time"
    numbers = {plan: number for number, plan in enumerate(numbered(found), 1)}
    number, notes = Column[PlannedStep]("number", "No.", "count", numbers.get), []
    for each in [each for each in shown if each in numbers and ",only=" in each.spec][:_MOST_OPTIONS]:
        optimizer = f" --optimizer {each.optimizer}" if each.optimizer else ""
        notes.append(f"Plan {numbers[each]} as options: -s {shlex.quote(each.spec)}{optimizer}")
    if found.exact.training.trained == "all" and any(each.training.trained == "adapters" for each in shown):
        notes.append(_ADAPTERS)
    notes += [f"Warning: {text}" for text, _ in warnings((each.spec, each.measurement.warnings) for each in shown)]
    notes += [*about_unknown(each.measurement.estimated for each in shown), *_notes(found)]
    table = fill(f"{title}: {about}", (number, *_columns(found)), shown, notes)
    return (replace(table, lead=tuple(verdict) or answer(found)), *_pairs(found, about), *_frontiers(found, about))


def _pairs(found: Fitted, about: str) -> Iterator[Table]:
    """Yield the table of measured plans, if there are any: the simulation of each, and below it the measurement."""
    tried, rows = {without_limit(each.record.case): each for each in found.tried}, list[_Row]()
    for record in found.on_device:
        beside = tried.get(without_limit(record.case.model_copy(update={"meter": "simulated"})))
        if beside is not None:
            rows += [_Row(beside.name, beside.record), _Row(beside.name, record, beside.measurement)]
    if rows:
        devices = dict.fromkeys(each.machine.gpu or each.machine.processor for each in found.on_device)
        failed = ((each.case, each.case.scheme, each.outcome) for each in found.on_device)
        where = f"Measured on {', '.join(devices)}, simulated for {found.case.device_profile}"
        said = [f"{where}. Off by: how much more the simulation says.", *failures(failed, names_of_cases)]
        yield fill(f"Measured and estimated: {about}", _PAIR_COLUMNS, rows, said)


def _frontiers(found: Fitted, about: str) -> Iterator[Table]:
    """Yield the frontier with exact gradients, and that with any if it is another."""
    for exact, gradients in ((True, "exact"), (False, "any")):
        front = found.frontier(exact=exact)
        if len(front) > 1 and (exact or front != found.frontier(exact=True)):
            table = fill(f"Frontier of memory and time, {gradients} gradients: {about}", _columns(found), front)
            keys = {"label": "plan", "seconds": "estimated_step_seconds", "bytes": "need_bytes"}
            drawn = Curve(f"{gradients} gradients", about, limit_bytes=found.limit_bytes, **keys)
            yield replace(table, curve=drawn)


_CONTEXT: Final = f"A CUDA context takes some {CONTEXT_BYTES / GIB:.1f} GiB of a card beside the limit."


def _notes(found: Fitted) -> list[str]:
    case, base = found.case, found.exact.record.asked.scheme
    settings = f"Limit {format_bytes(found.limit_bytes)}, at most {found.max_slowdown:g} times the exact step's time"
    told = ("sequence length", case.sequence_length), ("type", case.dtype), ("autocast", case.autocast)
    for name, value in (*told, ("optimizer", case.optimizer)):
        settings += f", {name} {value}" if value else ""
    joined = sum(each.record.joined for each in found.tried)
    whole = len(found.tried) - joined
    plans = f"{'1 plan was' if whole == 1 else f'{whole} plans were'} simulated whole"
    plans += f", {joined} joined from traces of blocks" if joined else ""
    alone = "Unchanged" if base == "exact" else f"With {base} alone"
    needs, takes = format_bytes(found.exact.need_bytes), format_seconds(found.exact.seconds)
    fits = f" and takes {takes}" if found.has_room_for(found.exact) else f": it does not fit (it would take {takes})"
    notes = [f"{settings}; {plans}.", f"{alone}, a step needs {needs}{fits}. Times are estimated."]
    notes += [] if case.device_profile == "cpu" else [_CONTEXT]
    notes += [] if base == "exact" else [f"Every plan has {base}, and so has the exact step."]
    exact, other = found.uniform(exact=True), found.uniform(exact=False)
    for gradients, plan in (("exact", exact), ("any", None if other is exact else other)):
        if plan is not None and plan is not found.exact:
            costs = f"{format_bytes(plan.need_bytes)}, {plan.slowdown:.2f}x the time"
            notes.append(f"The same for all blocks, {gradients} gradients: {costs}: {plan.name}.")
    return notes


FITTED: Final = Kind("fit", FitRecord, fit_tables, FIT_TITLE)
