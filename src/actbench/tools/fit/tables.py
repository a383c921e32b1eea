"""The tables of ``actbench fit``: the shortlist, the shortlist with adapters, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from actbench.model.measured import Measurement
from actbench.report.kinds import Kind
from actbench.report.sentences import failures, names_of_cases, warnings
from actbench.report.tables.table import Table, about_unknown, fill
from actbench.report.tables.values import Column, Item, SpreadValue, Value, change, step_time, with_spread
from actbench.tools.fit.records import FitRecord, Fitted, Tried, fitted, simulated, step_seconds_of
from actbench.units import format_bytes, format_seconds

FIT_TITLE = "What fits"


def _at_peak(part: str, title: str) -> Column[Tried]:
    def compute(tried: Tried) -> Value:
        return getattr(tried.measured.peak_parts, part, None)

    return Column(part, title, "bytes", compute, "lower", detail=2)


def _differs(tried: Tried) -> str:
    training = tried.training
    found = [what for what in ("updates", "precision") if getattr(training, what) == "other"]
    return ", ".join([*found, *(["adapters"] if training.trained == "adapters" else [])])


def _optimizer(tried: Tried) -> str:
    return tried.record.case.optimizer or f"the model's own {tried.measured.optimizer}"


_COLUMNS: tuple[Column[Tried], ...] = (
    Column("scheme", "Scheme", "text", lambda tried: tried.record.case.scheme),
    Column("optimizer", "Optimizer", "text", _optimizer),
    Column("peak_bytes", "Peak", "bytes", lambda tried: tried.measured.peak_bytes, "lower"),
    Column("over_limit_bytes", "Over limit", "bytes", lambda tried: tried.measured.over_limit_bytes, "lower"),
    Column("estimated_step_seconds", "Step (est.)", "seconds", lambda tried: tried.seconds, "lower"),
    Column("slowdown", "Slowdown (est.)", "ratio", lambda tried: tried.slowdown, "lower"),
    Column("gradient", "Gradient", "text", lambda tried: tried.training.gradient, detail=1),
    Column("differs", "Also changes", "text", _differs, detail=1),
    _at_peak("weights_bytes", "Weights at peak"),
    _at_peak("gradients_bytes", "Gradients at peak"),
    _at_peak("optimizer_bytes", "Optimizer state at peak"),
    _at_peak("activation_bytes", "Activations at peak"),
    _at_peak("temporary_bytes", "Temporaries at peak"),
    Column("on_frontier", "Frontier", "flag", lambda tried: tried.on_frontier or None, detail=1),
)


@dataclass(frozen=True)
class _Row:
    """A stack, simulated or measured on a device.

    Attributes:
        simulated: The simulation that a measured row is compared with; None in the row of the simulation.
    """

    record: FitRecord
    simulated: Measurement | None = None

    @property
    def measured(self) -> Measurement | None:
        return self.record.outcome if isinstance(self.record.outcome, Measurement) else None

    @property
    def step(self) -> SpreadValue | None:
        return step_time(self.measured.step_seconds) if self.measured else None


def _warnings(rows: Sequence[Tried]) -> list[str]:
    """Return the warnings of the rows' simulations, each once, and the operators that are counted roughly."""
    said = warnings((each.record.case.scheme, each.measured.warnings) for each in rows)
    return [*(f"Warning: {text}" for text, _ in said), *about_unknown(each.measured.estimated for each in rows)]


def _pairs(found: Fitted) -> list[_Row]:
    """Return two rows for each measured stack: the simulation, and below it the measurement."""
    tried = {each.record.case: each for each in found.tried}
    return [
        row
        for record in found.on_device
        if (beside := tried.get(simulated(record.case))) is not None
        for row in (_Row(beside.record), _Row(record, beside.measured))
    ]


def _peak_off(row: _Row) -> Value:
    return change(row.measured.peak_bytes, row.simulated.peak_bytes) if row.measured and row.simulated else None


def _step_off(row: _Row) -> Value:
    return change(row.step.value, step_seconds_of(row.simulated)) if row.step and row.simulated else None


def _estimate_of(row: _Row) -> Value:
    return step_seconds_of(row.measured) if row.measured else None


_PAIR_COLUMNS: tuple[Column[_Row], ...] = (
    Column("scheme", "Scheme", "text", lambda row: row.record.case.scheme),
    Column("optimizer", "Optimizer", "text", lambda row: row.record.case.optimizer),
    Column("meter", "Meter", "text", lambda row: row.record.case.meter),
    Column("peak_bytes", "Peak", "bytes", lambda row: row.record.outcome.peak_bytes),
    Column("peak_estimate_error", "Peak off by", "change", _peak_off),
    *with_spread("step_seconds", "Step", "seconds", lambda row: row.step),
    Column("estimated_step_seconds", "Step", "seconds", _estimate_of, estimate_of="step_seconds"),
    Column("step_estimate_error", "Step off by", "change", _step_off),
    Column("failure", "Failure", "text", lambda row: getattr(row.record.outcome, "reason", None)),
)


def _notes_of_pairs(found: Fitted) -> list[str]:
    """Return the devices of the measurements, and the reasons of failures."""
    devices = dict.fromkeys(each.machine.gpu or each.machine.processor for each in found.on_device)
    failed = ((each.case, each.case.scheme, each.outcome) for each in found.on_device)
    where = f"Measured on {', '.join(devices)}, simulated for {found.case.device_profile}"
    return [
        f"{where}. Off by: how much more the simulation says.",
        *failures(failed, names_of_cases),
    ]


def fit_tables(records: Sequence[FitRecord], title: str = FIT_TITLE) -> tuple[Table, ...]:
    """Return the tables of a file of fits: for each exact step, two shortlists (one with adapters) and a frontier."""
    tables = [table for found in fitted(records) for table in tables_of(found, title)]
    return tuple(tables) or (fill(title, _COLUMNS, []),)


def tables_of(found: Fitted, title: str) -> tuple[Table, ...]:
    """Return the tables of the stacks that were tried for one exact step."""
    about = f"{found.case.model}, batch {found.case.batch_size}, on {found.case.device_profile}"
    columns = _columns(found, _COLUMNS)
    rows, none = _rows(found, adapters=False)
    main = rows if found.exact in rows else [found.exact, *rows]
    tables = [fill(f"{none or title}: {about}", columns, main, [*_notes(found), *_warnings(rows)])]
    adapters, none = _rows(found, adapters=True)
    if adapters:
        why = "Other parameters are trained than by the exact step: low-rank matrices beside frozen weights."
        titled = f"With adapters{f', {none[0].lower()}{none[1:]}' if none else ''}: {about}"
        tables.append(fill(titled, columns, adapters, [why, *_warnings(adapters)]))
    pairs = _pairs(found)
    if pairs:
        title_of_pairs = f"Measured beside estimated: {about}"
        tables.append(fill(title_of_pairs, _columns(found, _PAIR_COLUMNS), pairs, _notes_of_pairs(found)))
    if front := [each for each in found.tried if each.on_frontier]:
        tables.append(fill(f"Frontier of time and memory: {about}", columns, front))
    return tuple(tables)


def _rows(found: Fitted, *, adapters: bool) -> tuple[list[Tried], str]:
    """Return the rows of a shortlist, or else what is nearest to one, with a title that says so."""
    rows = found.shortlist(adapters=adapters)
    if rows:
        return rows, ""
    rows = found.nearest(adapters=adapters)
    if any(each.measured.fits for each in rows):
        return rows, f"Nothing takes at most {found.max_slowdown:g} times the exact step's time; what fits"
    return rows, "Nothing fits; what needs least"


def _columns(found: Fitted, columns: tuple[Column[Item], ...]) -> tuple[Column[Item], ...]:
    varies = any(each.record.case.optimizer != found.case.optimizer for each in found.tried)
    return tuple(column for column in columns if varies or column.key != "optimizer")


def _notes(found: Fitted) -> list[str]:
    limit = found.exact.measured.memory_limit_bytes or 0
    case = found.case
    settings = [f"limit {format_bytes(limit)}", f"at most {found.max_slowdown:g} times the exact step's time"]
    settings += [f"sequence length {case.sequence_length}"] if case.sequence_length else []
    settings += [f"type {case.dtype}"] if case.dtype else []
    settings += [f"autocast {case.autocast}"] if case.autocast else []
    settings += [f"optimizer {case.optimizer}"] if case.optimizer else []
    count = len(found.tried)
    stacks = "1 stack was" if count == 1 else f"{count} stacks were"
    takes = f"takes {format_seconds(found.exact.seconds)}"
    exact = takes if found.exact.measured.fits else f"is there to compare with: it does not fit, and {takes}"
    return [
        f"{', '.join(settings)[0].upper()}{', '.join(settings)[1:]}; {stacks} simulated.",
        f"The exact step {exact}. Times are estimated.",
    ]


FITTED: Final = Kind("fit", FitRecord, fit_tables, FIT_TITLE)
