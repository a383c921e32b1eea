"""A conversion: what passes between the command and the process that converts, and the tables of what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actbench.results.records import Built, Case, Site, Unreached
from actbench.results.tables.columns import Column, quotient
from actbench.results.tables.table import Table, fill
from actbench.units import format_bytes


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion to be done.

    Attributes:
        case: What is converted: model, scheme, weights policy, and the batch for which bytes are told.
        output: Folder to write; None names one after model and scheme.
        dry_run: Whether nothing is written.
        force: Whether a folder that holds a converted model is replaced.
    """

    case: Case
    output: Path | None
    dry_run: bool
    force: bool


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion changed and what it is worth.

    Attributes:
        case: What was converted; bytes are for its batch.
        sites: What changed, with the bytes each keeps for backward before and after.
        unreached: What a reader might expect to have changed and did not, with the reason.
        bytes_before: What the exact model keeps for backward in one step, all of it.
        bytes_after: The same of the converted model.
        folder: Where the model was written, or None for a dry run.
        weights_origin: Where the weights come from.
        built: What the model and task came to; None where the function that builds it does not say.
        warnings: What a user must know of how the model was found.
        seconds: How long it all took.
    """

    case: Case
    sites: tuple[Site, ...]
    unreached: tuple[Unreached, ...]
    bytes_before: int
    bytes_after: int
    folder: Path | None
    weights_origin: str
    built: Built | None
    warnings: tuple[str, ...]
    seconds: float


SITES: tuple[Column[Site], ...] = (
    Column("path", "Module", "text", lambda site: site.path or "(the model)"),
    Column("was", "Was", "text", lambda site: site.was),
    Column("becomes", "Becomes", "text", lambda site: site.becomes),
    Column("calls", "Calls", "count", lambda site: site.calls),
    Column("bytes_before", "Kept before", "bytes", lambda site: site.bytes_before),
    Column("bytes_after", "Kept after", "bytes", lambda site: site.bytes_after),
    Column("smaller_by", "Smaller by", "ratio", lambda site: quotient(site.bytes_before, site.bytes_after)),
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
