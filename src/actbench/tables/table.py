"""Tables: columns that were declared once, filled from records, with the notes a reader needs to trust the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from actbench import defaults
from actbench.records import Record, Site, Unreached
from actbench.tables.columns import (
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
    quotient,
)
from actbench.tables.entries import Entry, join
from actbench.tables.notes import notes_of
from actbench.tables.rows import Rows, blocks
from actbench.tables.settings import Settings, constant
from actbench.tables.values import Value
from actbench.units import format_bytes

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


def results_table(records: Sequence[Record], title: str = "Results") -> Table:
    """Return the comparison of schemes: one row for each record, ratios against the exact model's."""
    return _results_table(join(records), title)


def estimates_table(records: Sequence[Record], title: str = "Estimates against measurements") -> Table:
    """Return how far the simulated meter was off, one row for each measured case that was also simulated."""
    return _estimates_table(join(records), title)


def report_tables(records: Sequence[Record], title: str = "Results") -> tuple[Table, ...]:
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
    is_usual = all(entry.record.case.optimizer == defaults.OPTIMIZER for entry in entries)
    quiet = is_usual and constant(known, [OPTIMIZER_STATE])[OPTIMIZER_STATE] is not None
    return tuple(replace(column, quiet=quiet) if column is OPTIMIZER_STATE else column for column in RESULTS)


def _smaller_by(site: Site) -> Value:
    return quotient(site.bytes_before, site.bytes_after)


SITES: tuple[Column[Site], ...] = (
    Column("path", "Module", "text", lambda site: site.path or "(the model)"),
    Column("was", "Was", "text", lambda site: site.was),
    Column("becomes", "Becomes", "text", lambda site: site.becomes),
    Column("calls", "Calls", "count", lambda site: site.calls),
    Column("bytes_before", "Kept before", "bytes", lambda site: site.bytes_before),
    Column("bytes_after", "Kept after", "bytes", lambda site: site.bytes_after),
    Column("smaller_by", "Smaller by", "ratio", _smaller_by),
)
UNREACHED: tuple[Column[Unreached], ...] = (
    Column("path", "Module", "text", lambda place: place.path or "(the model)"),
    Column("kind", "Kind", "text", lambda place: place.kind),
    Column("reason", "Not reached because", "text", lambda place: place.reason),
)


def sites_table(sites: Sequence[Site], title: str = "Converted sites", saved_bytes: int | None = None) -> Table:
    """Return what was converted, with the bytes it keeps for backward before and after, and totals.

    A site that the step never ran keeps nothing either way: it is shown and not counted.

    Args:
        sites: What was converted.
        title: Of the table.
        saved_bytes: What the whole model keeps less. Where the sites lose more, a note says that others keep the rest.
    """
    ran = [site for site in sites if site.calls != 0]
    notes = []
    if len(ran) < len(sites):
        notes.append(f"{len(sites) - len(ran)} of {len(sites)} sites never ran in the step and are not counted.")
    if any(site.bytes_before == 0 for site in ran):
        notes.append("A tensor that several places keep is counted at the first: 0 B before means that another has it.")
    total = _total(ran)
    lost = (total.bytes_before or 0) - (total.bytes_after or 0)
    if saved_bytes is not None and lost > saved_bytes:
        notes.append(
            f"{format_bytes(lost)} leave these places, {format_bytes(saved_bytes)} the model: "
            "other layers keep some of the same tensors."
        )
    return fill(title, SITES, [*sites, total], notes)


def unreached_table(unreached: Sequence[Unreached], title: str = "Not converted") -> Table:
    """Return the places that a reader might expect to be converted and that were not, with the reasons."""
    return fill(title, UNREACHED, unreached)


def _total(sites: Sequence[Site]) -> Site:
    """Return the sum of sites; what a site holds is not added again for a site inside it."""
    outer = [site for site in sites if not any(_inside(site, other) for other in sites)]
    before = [site.bytes_before for site in outer if site.bytes_before is not None]
    after = [site.bytes_after for site in outer if site.bytes_after is not None]
    return Site(
        path=f"total of {len(sites)}",
        was="",
        becomes="",
        bytes_before=sum(before) if before else None,
        bytes_after=sum(after) if after else None,
    )


def _inside(site: Site, other: Site) -> bool:
    return site.path != other.path and (not other.path or site.path.startswith(f"{other.path}."))


def to_frame(table: Table) -> pandas.DataFrame:
    """Return the table as a data frame with the columns' keys, in bytes and seconds."""
    import pandas  # takes a third of a second, which a report in a terminal should not

    return pandas.DataFrame(list(table.rows), columns=[column.key for column in table.columns])
