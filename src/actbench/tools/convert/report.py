"""A conversion: the messages between the command and the process that converts, and the tables of what changed.

Places of a model whose paths differ only in numbers, and that are otherwise equal, are shown as one row.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from pydantic import ConfigDict

from actbench.model.records import Built, Case, Site, Unreached
from actbench.report.tables.table import Table, fill
from actbench.report.tables.values import Column, quotient
from actbench.units import counted, format_bytes

T = TypeVar("T", Site, Unreached)


class _Folded(NamedTuple):
    names: tuple[str, ...]
    attributes: Hashable
    first: int
    times: int


def folded(places: Sequence[T]) -> list[tuple[T, int]]:
    """Return places, equal ones as one with ``[first-last]`` in its path, as ``only=`` takes it, and how many it is.

    Places are equal if they do not differ except for their paths, and the paths differ only in consecutive numbers. A row
    stands where the first of its places stood.
    """
    rows = [
        _Folded(tuple(place.path.split(".")), tuple(place.model_dump(exclude={"path"}).items()), index, 1)
        for index, place in enumerate(places)
    ]
    for depth in range(max((len(row.names) for row in rows), default=0)):
        rows = sorted(_along(rows, depth), key=lambda row: row.first)
    return [(places[row.first].model_copy(update={"path": ".".join(row.names)}), row.times) for row in rows]


def _along(rows: Sequence[_Folded], depth: int) -> Iterator[_Folded]:
    """Yield rows, one for each run of consecutive numbers among the names at a depth."""
    groups: dict[Hashable, list[_Folded]] = {}
    for row in rows:
        if len(row.names) > depth and row.names[depth].isdecimal():
            around = row.names[:depth], row.names[depth + 1 :]
            groups.setdefault((around, row.attributes, row.times), []).append(row)
        else:
            yield row
    for group in groups.values():
        numbered = sorted((int(row.names[depth]), row) for row in group)
        for _, run in groupby(enumerate(numbered), lambda each: each[1][0] - each[0]):
            yield _as_one([each for _, each in run], depth)


def _as_one(run: Sequence[tuple[int, _Folded]], depth: int) -> _Folded:
    (low, row), (high, _) = run[0], run[-1]
    if len(run) == 1:
        return row
    names = (*row.names[:depth], f"[{low}-{high}]", *row.names[depth + 1 :])
    return row._replace(names=names, first=min(each.first for _, each in run), times=len(run) * row.times)


@dataclass(frozen=True)
class ConversionRequest:
    """What to convert; by default the folder is named after model and scheme."""

    case: Case
    output: Path | None
    dry_run: bool
    force: bool
    probe: bool = False


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion changed and what it saves.

    Attributes:
        sites: What changed, with the bytes that each site saves for backward before and after.
        bytes_before: Bytes that the exact model saves for backward in one step of the case's batch.
        bytes_after: Bytes that the converted model saves.
        folder: Where the model was written, or None for a dry run.
        built: The class of the model, and its task; None if a function of the user's own does not say.
        gradient_error: Relative L2 error of the gradient of one batch, if requested; NaN if a gradient is not finite.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")  # as Data: null is no figure

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
    gradient_error: float | None = None


SITES: tuple[Column[Site], ...] = (
    Column("path", "Module", "text", lambda site: site.path or "(the model)"),
    Column("was", "Was", "text", lambda site: site.was),
    Column("becomes", "Becomes", "text", lambda site: site.becomes),
    Column("calls", "Calls", "count", lambda site: site.calls),
    Column("bytes_before", "Kept before", "bytes", lambda site: site.bytes_before),
    Column("bytes_after", "Kept after", "bytes", lambda site: site.bytes_after),
    Column("smaller_by", "Smaller by", "reduction", lambda site: quotient(site.bytes_before or None, site.bytes_after)),
)
UNREACHED: tuple[Column[Unreached], ...] = (
    Column("path", "Module", "text", lambda place: place.path or "(the model)"),
    Column("kind", "Kind", "text", lambda place: place.kind),
    Column("reason", "Not reached because", "text", lambda place: place.reason),
)


def sites_table(
    sites: Sequence[Site], title: str = "Converted sites", saved_bytes: int | None = None, *, fold: bool = False
) -> Table:
    """Return the converted sites, with the bytes each saves for backward before and after, and totals.

    Sites that never ran are shown and not counted. ``saved_bytes`` is the saving of the whole model: if the sites save
    more than that, a note says that other layers keep the rest. With ``fold`` equal sites are one row, with
    their sums.
    """
    ran = [site for site in sites if site.calls != 0]
    notes = []
    if len(ran) < len(sites):
        notes.append(
            f"Not counted, since the step never ran them: {len(sites) - len(ran)} of {counted(len(sites), 'site')}."
        )
    if any(site.bytes_before == 0 for site in ran):
        notes.append(
            "A tensor that several places keep is counted once, at the first: 0 B before means that another row has it."
        )
    total = _total(ran)
    lost = (total.bytes_before or 0) - (total.bytes_after or 0)
    if saved_bytes is not None and lost > saved_bytes:
        whole = f"{format_bytes(abs(saved_bytes))} {'more' if saved_bytes < 0 else 'less'}"
        notes.append(
            f"These places keep {format_bytes(lost)} less, the whole model {whole}: other layers keep some of the same "
            "tensors."
        )
    shown = [_times(site, times) for site, times in folded(sites)] if fold else sites
    if len(shown) < len(sites):
        notes.append("A row with [first-last] stands for several equal places, counted together; exports list each.")
    return fill(title, SITES, [*shown, total], notes)


def unreached_table(unreached: Sequence[Unreached]) -> Table:
    """Return the places that a reader may expect to be converted, and why they are not.

    Alike ones are one row, and so are many of one kind that are left for one reason.
    """
    groups: dict[tuple[str, str], list[tuple[Unreached, int]]] = {}
    for place, times in folded(unreached):
        groups.setdefault((place.kind, place.reason), []).append((place, times))
    shown = [each for rows in groups.values() for each in (_in_one(rows) if len(rows) > _MOST_ALONE else rows)]
    return fill("Not converted", UNREACHED, [place for place, _ in shown])


_MOST_ALONE = 3  # rows that differ in nothing but the module


def _in_one(rows: Sequence[tuple[Unreached, int]]) -> list[tuple[Unreached, int]]:
    """Return one row for all, whose name counts the modules and has the first."""
    count = sum(times for _, times in rows)
    first = rows[0][0]
    return [(first.model_copy(update={"path": f"{count} modules, such as {first.path or '(the model)'}"}), count)]


def _times(site: Site, times: int) -> Site:
    """Return a site as the sum of several equal ones."""
    counted = {name: getattr(site, name) for name in ("bytes_before", "bytes_after", "calls")}
    return site.model_copy(update={name: times * each for name, each in counted.items() if each is not None})


def _total(sites: Sequence[Site]) -> Site:
    """Return the sum of the outermost sites."""
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
    return not other.called and site.path != other.path and (not other.path or site.path.startswith(f"{other.path}."))
