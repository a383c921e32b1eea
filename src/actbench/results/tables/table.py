"""Tables: columns that were declared once, filled from records, with the notes a reader needs to trust the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from actbench.results.measured import MeasuredRecord
from actbench.results.records import OPTIMIZER
from actbench.results.tables.columns import (
    BATCH,
    ESTIMATES,
    LABEL,
    MACHINE,
    METER,
    MODEL,
    OPTIMIZER_STATE,
    RESULTS,
    SCHEME,
    Column,
)
from actbench.results.tables.entries import Entry, join
from actbench.results.tables.notes import Settings, constant, notes_of
from actbench.results.tables.values import Rows, Value, blocks

if TYPE_CHECKING:
    import pandas

Item = TypeVar("Item")


@dataclass(frozen=True)
class Table:
    """Rows of raw values in base units under declared columns; a column without any value is not among them.

    Attributes:
        title: What the table shows.
        columns: From left to right.
        rows: Values by column key.
        notes: Sentences to stand below the table.
    """

    title: str
    columns: tuple[Column[Any], ...]
    rows: Sequence[Mapping[str, Value]]
    notes: tuple[str, ...] = ()


def fill(title: str, columns: Sequence[Column[Item]], items: Sequence[Item], notes: Sequence[str] = ()) -> Table:
    """Compute every column of every item; columns that are empty throughout are left out."""
    values: dict[str, list[Value]] = {column.key: [] for column in columns}
    for block in blocks(items):
        for column in columns:
            values[column.key].extend(map(column.compute, block))
    used = tuple(column for column in columns if any(value is not None for value in values[column.key]))
    return Table(title, used, Rows({column.key: values[column.key] for column in used}, len(items)), tuple(notes))


def results_table(records: Sequence[MeasuredRecord], title: str = "Results") -> Table:
    """Return the comparison of schemes: one row for each record, ratios against the exact model's."""
    return _results_table(join(records), title)


def estimates_table(records: Sequence[MeasuredRecord], title: str = "Estimates against measurements") -> Table:
    """Return how far the simulated meter was off, one row for each measured case that was also simulated."""
    return _estimates_table(join(records), title)


def report_tables(records: Sequence[MeasuredRecord], title: str = "Results") -> tuple[Table, ...]:
    """Return the comparison of schemes and, where cases were measured and simulated, how far the simulation was off."""
    entries = join(records)
    estimates = _estimates_table(entries)
    return (_results_table(entries, title), *([estimates] if estimates.rows else []))


def _results_table(entries: Sequence[Entry], title: str) -> Table:
    settings = Settings(entries)
    columns = (*_identity(entries, settings), *_results(entries))
    return fill(title, columns, entries, notes_of(entries, settings))


def _estimates_table(entries: Sequence[Entry], title: str = "Estimates against measurements") -> Table:
    compared = [entry for entry in entries if entry.estimate is not None and entry.measured is not None]
    return fill(title, (*_identity(compared, Settings(compared)), *ESTIMATES), compared)


def varying_settings(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """Return the settings in which entries of one model and meter differ."""
    return Settings(entries).varying


def _identity(entries: Sequence[Entry], settings: Settings) -> tuple[Column[Entry], ...]:
    machines = {MACHINE.compute(entry) for entry in entries}
    machine = (MACHINE,) if len(machines) > 1 else ()
    return (*machine, MODEL, *settings.varying, BATCH, SCHEME, LABEL, METER)


def _results(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """Return the columns of results; bytes of optimizer state are quiet where all rows of a model have the same."""
    known = [entry for entry in entries if OPTIMIZER_STATE.compute(entry) is not None]
    is_usual = all(entry.record.case.optimizer == OPTIMIZER for entry in entries)
    quiet = is_usual and constant(known, [OPTIMIZER_STATE])[OPTIMIZER_STATE] is not None
    return tuple(replace(column, quiet=quiet) if column is OPTIMIZER_STATE else column for column in RESULTS)


def to_frame(table: Table) -> pandas.DataFrame:
    """Return the table as a data frame with the columns' keys, in bytes and seconds."""
    import pandas  # takes a third of a second, which a report in a terminal should not

    return pandas.DataFrame(list(table.rows), columns=[column.key for column in table.columns])
