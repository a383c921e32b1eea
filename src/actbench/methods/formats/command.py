"""The verb encodings: number formats side by side."""

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING, Annotated

from actbench.cli.app import command, count_option, option
from actbench.cli.flags import expanded
from actbench.cli.printing import ExportFlags, ProgressFlags, export, progress_shown, show
from actbench.errors import UsageError
from actbench.report.tables import Table, fill
from actbench.report.tables.values import Column
from actbench.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actbench.methods.formats.encodings import Distribution, Quality

    Row = dict[str, Quality]

_SIMULATED = "Simulated: numbers stay as large as they were, and bits are as the authors count them, without metadata."

EncodingOption = Annotated[
    list[str] | None,
    option(
        "--encoding",
        "NAME[:VALUE][,key=value…], such as int:6, fp8:e5m2 or smaq_simulated,clamp=true; repeat for several rows. "
        "Default: one of each.",
        metavar="SPEC",
    ),
]
DistributionOption = Annotated[
    list[str] | None,
    option("--distribution", "normal, tiny, laplace …; repeat or separate by commas. Default: all.", metavar="NAME"),
]


@command(rank=110)
@expanded
def encodings(
    *,
    encoding: EncodingOption = None,
    distribution: DistributionOption = None,
    elements: Annotated[int, option("--elements", "Number of values of each distribution.", min=64, max=2**30)] = 2**20,
    seed: Annotated[int, count_option("--seed", "Seed of the numbers and of stochastic rounding.", least=0)] = 0,
    progress: ProgressFlags,
    exports: ExportFlags,
) -> None:
    """Compare number formats: stored bits per element, and signal to noise for several distributions.

    --export-json has the bits for each distribution; the table shows those of the first.

    Examples:

    actbench encodings

    actbench encodings --encoding int:6 --encoding smaq_simulated --distribution normal,relu
    """
    from actbench.methods.formats.encodings import COMPARED, build, snr_table

    chosen = _distributions(distribution)
    with progress_shown("", progress, as_lines=True) as told:
        found = snr_table(
            [build(text) for text in encoding or COMPARED],
            chosen,
            seed,
            elements,
            begins=_telling(told.doing, elements, len(chosen)),
        )
    table = _table(found, list(chosen), seed)
    text = json.dumps([row.model_dump(mode="json") for row in found], indent=2) + "\n"
    export(exports, [table], lambda: text)
    show(table, beside=exports)


def _telling(tell: Callable[[str], object], elements: int, count: int) -> Callable[[str], None]:
    """Return what tells of each distribution that begins, and how long all from it on may take: as long as others."""
    began, ended = time.monotonic(), itertools.count()

    def begins(name: str) -> None:
        done = next(ended)
        left = (count - done) * (time.monotonic() - began) / done if done else 0.0
        about = f", about {format_seconds(left)} left" if left >= 1 else ""
        tell(f"{elements:,} numbers, {name} ({done + 1} of {count}{about})")

    return begins


def _distributions(given: Sequence[str] | None) -> dict[str, Distribution]:
    from actbench.methods.formats.encodings import DISTRIBUTIONS

    names = [name.strip() for text in given or () for name in text.split(",")] or list(DISTRIBUTIONS)
    for name in names:
        if name not in DISTRIBUTIONS:
            raise UsageError(f"--distribution {name!r} is not one of {', '.join(DISTRIBUTIONS)}")
    return {name: DISTRIBUTIONS[name] for name in names}


def _table(found: Sequence[Quality], names: Sequence[str], seed: int) -> Table:
    """Return one row for each encoding, one column for each distribution."""
    rows: list[Row] = [
        {quality.distribution: quality for quality in found[first : first + len(names)]}
        for first in range(0, len(found), len(names))
    ]
    first = names[0]
    columns: list[Column[Row]] = [
        Column("encoding", "Encoding", "text", lambda row: row[first].encoding),
        Column("simulated", "Simulated", "flag", lambda row: not row[first].stored or None),
        Column("bits", "Bits stored", "number", lambda row: row[first].bits, "lower"),
        Column("counted_bits", "Bits counted", "number", lambda row: row[first].counted_bits, "lower"),
        *(_column(name) for name in names),
    ]
    numbers = f"{found[0].elements} float32 numbers of each distribution, seed {seed}"
    notes = [f"Signal to noise in decibels, of {numbers}; bits per element on {first!r}, with all metadata."]
    if not all(quality.stored for quality in found):
        notes.append(_SIMULATED)
    return fill("Encodings", columns, rows, notes)


def _column(name: str) -> Column[Row]:
    return Column(f"{name}_db", name, "number", lambda row: row[name].snr_db, "higher")
