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
    SETTINGS,
    Column,
    quotient,
)
from actbench.tables.entries import Entry, join
from actbench.tables.notes import notes_of
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
    rows: tuple[Mapping[str, Value], ...]
    notes: tuple[str, ...] = ()


def fill(title: str, columns: Sequence[Column[Item]], items: Sequence[Item], notes: Sequence[str] = ()) -> Table:
    """Compute every column of every item; columns that are empty throughout are left out."""
    rows = [{column.key: column.compute(item) for column in columns} for item in items]
    used = tuple(column for column in columns if any(row[column.key] is not None for row in rows))
    return Table(title, used, tuple({column.key: row[column.key] for column in used} for row in rows), tuple(notes))


def results_table(records: Sequence[Record], title: str = "Results") -> Table:
    """Return the comparison of schemes: one row for each record, ratios against the exact model's."""
    entries = join(records)
    one_meter = (METER,) if len({entry.record.case.meter for entry in entries}) == 1 else ()
    notes = notes_of(entries, (*one_meter, *_constant(entries, SETTINGS)))
    return fill(title, (*_identity(entries), *_results(entries)), entries, notes)


def estimates_table(records: Sequence[Record], title: str = "Estimates against measurements") -> Table:
    """Return how far the simulated meter was off, one row for each measured case that was also simulated."""
    entries = [entry for entry in join(records) if entry.estimate is not None and entry.measured is not None]
    return fill(title, (*_identity(entries), *ESTIMATES), entries)


def varying_settings(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """Return the settings in which entries of one model and meter differ."""
    constant = _constant(entries, SETTINGS)
    return tuple(column for column in SETTINGS if column not in constant)


def _identity(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    machines = {MACHINE.compute(entry) for entry in entries}
    machine = (MACHINE,) if len(machines) > 1 else ()
    return (*machine, MODEL, *varying_settings(entries), BATCH, SCHEME, LABEL, METER)


def _results(entries: Sequence[Entry]) -> tuple[Column[Entry], ...]:
    """Return the columns of results; bytes of optimizer state are quiet where all rows of a model have the same."""
    known = [entry for entry in entries if OPTIMIZER_STATE.compute(entry) is not None]
    is_usual = all(entry.record.case.optimizer == defaults.OPTIMIZER for entry in entries)
    quiet = is_usual and bool(_constant(known, [OPTIMIZER_STATE]))
    return tuple(replace(column, quiet=quiet) if column is OPTIMIZER_STATE else column for column in RESULTS)


def _constant(entries: Sequence[Entry], settings: Sequence[Column[Entry]]) -> tuple[Column[Entry], ...]:
    """Return the settings of which no model has more than one value on one meter."""
    groups = {_group(entry) for entry in entries}
    found = {column: {(_group(entry), column.compute(entry)) for entry in entries} for column in settings}
    return tuple(column for column, values in found.items() if len(values) == len(groups))


def _group(entry: Entry) -> tuple[str, str]:
    return entry.record.case.model, entry.record.case.meter


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
