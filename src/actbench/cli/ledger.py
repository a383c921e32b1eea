"""``actbench measure --ledger``: every tensor that is saved for backward, in place of a measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from actbench.cli.flags import ExportFlags
from actbench.cli.printing import show, write_files
from actbench.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from actbench.ledger import Ledger
    from actbench.recipe import Recipe
    from actbench.records import Case
    from actbench.tables import Table

Listed = tuple["Case", "Ledger"]


def list_saved(recipe: Recipe, exports: ExportFlags, *, exact: bool) -> None:
    """List what each case of a recipe saves, and write what was asked for.

    Args:
        recipe: Whose cases.
        exports: Files to write: Markdown and HTML have the tables as they are shown, CSV has all rows in one table, and
            JSON the records of :mod:`actbench.ledger` with their cases.
        exact: Whether the cases of the exact model are listed.

    Raises:
        ActbenchError: A case cannot be built, or its model needs values.
    """
    from actbench import bench, experiment, render
    from actbench.tables import LedgerLine, lines_table

    cases = [entry.case for entry in experiment.plan(recipe) if exact or entry.case.scheme != "exact"]
    listed = [(case, bench.itemize(case)) for case in cases]
    tables = [table for case, ledger in listed for table in _tables(case, ledger)]
    lines = [LedgerLine(case, saved) for case, ledger in listed for saved in ledger.entries]
    title = f"What is saved for backward: {recipe.name}"
    markdown, csv, as_json, html = exports.files
    write_files(
        (markdown, lambda: "\n".join(map(render.markdown, tables))),
        (csv, lambda: render.csv_text(lines_table(lines, title))),
        (as_json, lambda: _as_json(listed)),
        (html, lambda: render.html_page(tables, title)),
    )
    show(*tables)


def _tables(case: Case, ledger: Ledger) -> tuple[Table, Table]:
    from actbench.tables import ledger_table, operators_table

    title = f"Kept for backward by {case.scheme} on {case.model}, batch {case.batch_size} ({case.meter})"
    return ledger_table(ledger, title), operators_table(ledger)


def _as_json(listed: Sequence[Listed]) -> str:
    written = [
        {
            "schema_version": SCHEMA_VERSION,
            "case": case.model_dump(),
            "total_bytes": ledger.total_bytes,
            **ledger.model_dump(),
        }
        for case, ledger in listed
    ]
    return json.dumps(written, indent=2) + "\n"
