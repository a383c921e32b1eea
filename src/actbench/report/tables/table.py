"""Tables: declared columns filled from records, with notes on settings, machines, published figures and failures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from actbench.display import Displayed
from actbench.model.measured import MeasuredRecord
from actbench.model.modelspecs import OPTIMIZER
from actbench.model.provenance import Published
from actbench.report.advice import about_bounds, about_growth, about_largest, about_limits, about_peak, names_of
from actbench.report.sentences import SAME, failures, measured_on, names_of_cases, warnings
from actbench.report.tables.columns import (
    BATCH,
    ESTIMATES,
    LABEL,
    MACHINE,
    METER,
    MODEL,
    OPTIMIZER_STATE,
    RESULTS,
    SCHEME,
    SETTINGS,
    VS_PREVIOUS,
    diagnostic,
    selected,
)
from actbench.report.tables.computed import step_change
from actbench.report.tables.entries import Entry, join
from actbench.report.tables.estimates import about_estimates
from actbench.report.tables.values import Column, Curve, Item, Unit, Value, write

if TYPE_CHECKING:
    import pandas

Group = tuple[str, str]
"""A model and a meter."""

_NOTHING = 0.0005  # the column of savings shows less as 0.0 %
_FASTER = 0.05  # a step that is shorter by this share is what a scheme that saves nothing was taken for


class Settings:
    """The settings of a table's rows; ``varying`` are the columns in which rows of one model and meter differ."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        found = constant(entries, (METER, *SETTINGS))
        self.varying = tuple(column for column in SETTINGS if found[column] is None)
        self._constant = {column: values for column, values in found.items() if values is not None}
        if len(set(self._constant[METER].values())) > 1:
            del self._constant[METER]

    def described(self) -> list[str]:
        """Describe each constant setting for the largest group of rows that share it."""
        told: dict[str, list[str]] = {}
        for column, values in self._constant.items():
            for whose, value in _largest(values):
                if value is not None:
                    told.setdefault(whose, []).append(f"{column.title.lower()} {write(value, column.unit)}")
        return [
            f"{whose}: {', '.join(told[whose])}." for whose in sorted(told, key=lambda whose: (whose != SAME, whose))
        ]


def constant(
    entries: Sequence[Entry], columns: Sequence[Column[Entry]]
) -> dict[Column[Entry], dict[Group, Value] | None]:
    """Return for each column the value of each model and meter; None if rows of one group differ."""
    groups = [(entry.record.case.model, entry.record.case.meter) for entry in entries]
    count = len(set(groups))
    found = {column: set(zip(groups, map(column.compute, entries), strict=True)) for column in columns}
    return {column: dict(values) if len(values) == count else None for column, values in found.items()}


def _largest(values: Mapping[Group, Value]) -> Iterator[tuple[str, Value]]:
    """Yield the value of all rows, or else of each model, or else of each model and meter."""
    if len(set(values.values())) == 1:
        yield SAME, next(iter(values.values()))
        return
    models = {model for model, _ in values}
    if len({(model, value) for (model, _), value in values.items()}) == len(models):
        yield from {model: value for (model, _), value in values.items()}.items()
        return
    yield from ((f"{model} ({meter})", value) for (model, meter), value in values.items())


_PUBLISHED_UNITS: dict[str, Unit] = {"published_accuracy": "share", **{column.key: column.unit for column in RESULTS}}


def notes_of(
    entries: Sequence[Entry], settings: Settings, *, with_estimates: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the notes of a table with these rows and settings, and those of them that only add details.

    ``with_estimates`` has those on estimated times.
    """
    records = [entry.record for entry in entries]
    described, machines = settings.described(), list(measured_on(records))
    published = [published_note(record.case.scheme, item) for record in records for item in record.published]
    estimates = list(about_estimates(records)) if with_estimates else []
    lines = chain(
        described,
        about_largest(records),
        machines,
        published,
        failures(((record.case, record.case.scheme, record.outcome) for record in records), names_of_cases),
        about_limits(records),
        about_bounds(records),
        _saving_nothing(entries),
        about_growth((entry.record, entry.exact) for entry in entries),
        estimates,
        _warnings(records),
    )
    notes = dict.fromkeys(lines)
    if any(record.versions.dirty for record in records):
        notes["Rows marked uncommitted were measured with changes that no commit holds."] = None
    return tuple(notes), (*described, *machines, *published, *estimates)


def published_note(scheme: str, item: Published) -> str:
    """Return the sentence about a published figure of a scheme."""
    value = write(item.value, _PUBLISHED_UNITS[f"published_{item.quantity}"])
    quantity = item.quantity.replace("_", " ")
    return f"Published for {scheme}: {quantity} {value} ({item.setting}; {item.source})."


def _saving_nothing(entries: Sequence[Entry]) -> Iterable[str]:
    """Yield the schemes that save nothing of the peak, or nothing more than their stack without them, with why.

    Schemes that make the step faster are left out.
    """
    groups: dict[tuple[str, str], list[MeasuredRecord]] = {}
    for entry in entries:
        measured, before, against = entry.measured, entry.exact_peak_bytes, ""
        if entry.previous is not None and entry.previous.case.scheme != "exact":
            before, against = entry.previous.outcome.peak_bytes, f" compared with {entry.previous.case.scheme}"
        about = None if measured is None or measured is entry.exact else about_peak(measured, entry.record.case)
        is_faster = (step_change(entry) or 0.0) <= -_FASTER
        if about and measured and before and not is_faster and abs(1 - measured.peak_bytes / before) < _NOTHING:
            groups.setdefault((against, about), []).append(entry.record)
    table = [entry.record for entry in entries]
    for (against, about), records in groups.items():
        yield f"{names_of(records, table)}: no lower peak{against}: it {about.removeprefix('the peak ')}"


def _warnings(records: Sequence[MeasuredRecord]) -> Iterable[str]:
    for text, count in warnings((each.case.scheme, getattr(each.outcome, "warnings", ())) for each in records):
        yield f"Warning: {text}" if count == len(records) else f"Warning in {count} of {len(records)} rows: {text}"


@dataclass(frozen=True, eq=False, repr=False)
class Table(Displayed):
    """Rows of raw values in base units; ``columns`` has no column without any value.

    Attributes:
        title: The heading.
        columns: The columns.
        frame: The rows, with the keys of the columns; its dtypes are ``object``, since None is unknown and NaN a value.
        notes: Sentences below the rows.
        lead: Sentences above the rows: the answer that they support.
        curve: What a page draws of it.
        code: Code to paste, each with a heading, for Markdown and pages.
        details: The notes that are left out first where there is little room.
    """

    title: str
    columns: tuple[Column[Any], ...]
    frame: pandas.DataFrame
    notes: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()
    curve: Curve | None = None
    code: tuple[tuple[str, str], ...] = ()
    details: tuple[str, ...] = ()

    @property
    def rows(self) -> list[dict[str, Value]]:
        """The values of each row by column key."""
        found: list[dict[str, Value]] = self.frame.to_dict("records")
        return found

    def __repr__(self) -> str:
        """Return the heading, and how large the table is."""
        return f"<Table {self.title!r}: {len(self.frame)} rows, {len(self.columns)} columns>"


def fill(
    title: str,
    columns: Sequence[Column[Item]],
    items: Sequence[Item],
    notes: Sequence[str] = (),
    asked: Collection[str] = (),
) -> Table:
    """Compute every column of every item; empty columns are left out, except those with names in ``asked``."""
    import pandas  # takes half a second, which no command pays that prints no table

    filled: dict[str, pandas.Series] = {}
    for column in columns:
        values = list(map(column.compute, items))
        if values.count(None) < len(values):
            filled[column.key] = pandas.Series(values, dtype=object)
    shown = {*filled, *(column.estimate_of for column in columns if column.key in filled)}
    used = tuple(column for column in columns if (column.name in asked and not column.within) or column.key in shown)
    unknown = pandas.Series([None] * len(items), dtype=object)
    frame = pandas.DataFrame({column.key: filled.get(column.key, unknown) for column in used}, range(len(items)))
    return Table(title, used, frame, tuple(notes))


def results_table(records: Sequence[MeasuredRecord], title: str = "Results", columns: Sequence[str] = ()) -> Table:
    """Return the comparison of schemes: a row for each record, with ratios to the exact model.

    ``columns`` are the names of the columns to show; empty for all; see :mod:`actbench.report.tables.columns`.
    """
    return _results_table(join(records), title, columns, columns)


def estimates_table(records: Sequence[MeasuredRecord], title: str = "Estimates against measurements") -> Table:
    """Return the errors of the simulated meter: a row for each case that was measured and simulated."""
    return _estimates_table(join(records), title)


def report_tables(
    records: Sequence[MeasuredRecord],
    title: str = "Results",
    columns: Sequence[str] = (),
    schemes: Sequence[str] = (),
    never_hidden: Sequence[str] | None = None,
) -> tuple[Table, ...]:
    """Return the comparison of schemes and, if there are estimates, their table.

    With ``columns``, as for :func:`results_table`, return only the comparison. Rows are in the order of ``schemes``, as
    records spell them; those of others follow. ``never_hidden`` are the names of columns that stay where a terminal is
    narrow and where they say nothing; None for all of ``columns``.
    """
    entries = join(records, schemes)
    results = _results_table(entries, title, columns, columns if never_hidden is None else never_hidden)
    estimates = _estimates_table([] if columns else entries)
    return (results, estimates) if len(estimates.frame) else (results,)


def _results_table(entries: Sequence[Entry], title: str, names: Sequence[str], never_hidden: Sequence[str]) -> Table:
    settings = Settings(entries)
    columns = selected(names, _identity(entries, settings), _results(entries), never_hidden)
    is_estimated = any(column.key.startswith("estimated_") for column in columns)
    notes, details = notes_of(entries, settings, with_estimates=is_estimated)
    shown = [each for column in columns for each in with_seeds(column)]
    return replace(fill(title, shown, entries, notes, asked={*names, *never_hidden}), details=details)


def _estimates_table(entries: Sequence[Entry], title: str = "Estimates against measurements") -> Table:
    compared = [entry for entry in entries if entry.estimate is not None and entry.measured is not None]
    return fill(title, (*_identity(compared, Settings(compared)), *ESTIMATES), compared)


def varying_settings(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """Return the settings in which entries of one model and meter differ."""
    return Settings(entries).varying


def _identity(entries: Sequence[Entry], settings: Settings) -> tuple[Column[Entry], ...]:
    machines = {MACHINE.compute(entry) for entry in entries}
    machine = (MACHINE,) if len(machines) > 1 else ()
    meter = METER if len({entry.record.case.meter for entry in entries}) < 2 else replace(METER, detail=0)
    return (*machine, MODEL, *settings.varying, BATCH, SCHEME, LABEL, meter)


def _results(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """Return the columns of results that are of interest.

    Optimizer state is quiet if it is the same in all rows of a model. "vs previous" is shown if a stack of schemes
    extends another than the exact model.
    """
    known = [entry for entry in entries if OPTIMIZER_STATE.compute(entry) is not None]
    is_usual = all(entry.record.case.optimizer == OPTIMIZER for entry in entries)
    quiet = is_usual and constant(known, [OPTIMIZER_STATE])[OPTIMIZER_STATE] is not None
    grows = any(entry.extends for entry in entries)
    shown = [
        replace(column, quiet=quiet) if column is OPTIMIZER_STATE else column
        for column in RESULTS
        if grows or column not in VS_PREVIOUS
    ]
    keys = {column.key for column in RESULTS}
    found = {each.name: each.title for entry in entries if entry.measured for each in entry.measured.diagnostics}
    return (*shown, *(diagnostic(name, title) for name, title in found.items() if name not in keys))


_OVER_SEEDS = ("peak_bytes", "activation_bytes", "largest_batch", "gradient_error", "gradient_cosine")


def with_seeds(column: Column[Entry]) -> tuple[Column[Entry], ...]:
    """Return a column, and for some the deviation over the seeds of a row, which is empty for a row of one seed."""
    if column.key not in _OVER_SEEDS:
        return (column,)
    key = column.key
    return column, Column(f"{key}_spread", "±", column.unit, lambda entry: entry.seeded.spread(key), spread_of=key)
