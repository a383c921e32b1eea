"""``measure --ledger``: every tensor that is saved for backward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from actbench.cli.app import count_option, option
from actbench.cli.printing import ExportFlags, ProgressFlags, call_task, export, show
from actbench.model.records import SCHEMA_VERSION, Case
from actbench.report.tables import Table

if TYPE_CHECKING:
    from actbench.model.ledger import Ledger
    from actbench.run.recipes import Recipe
    from actbench.run.tasks import Tasks


@dataclass(frozen=True)
class LedgerFlags:
    """Flags that list saved tensors instead of measuring a step."""

    ledger: Annotated[
        bool, option("--ledger", "Measure nothing; list every tensor that is saved for backward, on fake tensors.")
    ] = False
    top: Annotated[
        int | None, count_option("--top", "With --ledger: the largest rows of each table (default: 20).")
    ] = None
    everything: Annotated[
        bool, option("--all", "With --ledger: all rows in the order of the run, also those of 0 B.")
    ] = False


def list_saved(
    recipe: Recipe,
    exports: ExportFlags,
    flags: LedgerFlags,
    progress: ProgressFlags,
    *,
    exact: bool,
    timeout: float,
) -> None:
    """List the saved tensors of each case of a recipe, and write the requested files.

    Markdown and HTML have the tables as shown, CSV has all rows in one table, and JSON has the ledgers with their
    cases. ``exact`` tells whether the exact model is listed. All cases share one process and ``timeout``.

    Raises:
        ActbenchError: A case cannot be built, its model needs values or ends its process, or they take too long.
    """
    from actbench.report.ledgertables import LedgerLine, lines_table
    from actbench.report.tables.groups import told_settings, varying_settings
    from actbench.run.executor import PRELOAD
    from actbench.run.tasks import Tasks

    with Tasks("actbench.measuring.timelines", PRELOAD) as tasks:
        from actbench.run import sweep  # which imports torch, as the process of the tasks does meanwhile

        planned = sweep.plan(recipe, look_up=sweep.looked_up_by(tasks.server, timeout))
        cases = [entry.case for entry in planned if exact or entry.case.scheme != "exact"]
        doing = f"listing what {recipe.name!r} keeps for backward"
        listed = list(zip(cases, _ledgers(tasks, cases, doing, timeout, progress), strict=True))
    settings = map(told_settings, varying_settings(cases))
    tables = [
        table
        for (case, ledger), varying in zip(listed, settings, strict=True)
        for table in _tables(case, ledger, flags, varying)
    ]
    lines = [LedgerLine(case, saved) for case, ledger in listed for saved in ledger.entries]
    title = f"What is saved for backward: {recipe.name}"
    export(exports, tables, lambda: _as_json(listed), csv=lambda: lines_table(lines, title), title=title)
    show(*tables, beside=exports)


def _ledgers(tasks: Tasks, cases: Sequence[Case], doing: str, timeout: float, progress: ProgressFlags) -> list[Ledger]:
    from pydantic import TypeAdapter

    from actbench.model.ledger import Ledger

    text = TypeAdapter(list[Case]).dump_json(list(cases)).decode()
    answer = call_task(tasks, "itemize_all", text, doing=doing, timeout_seconds=timeout, flags=progress)
    return TypeAdapter(list[Ledger]).validate_json(answer)


def _tables(case: Case, ledger: Ledger, flags: LedgerFlags, settings: str) -> tuple[Table, ...]:
    from actbench.report.ledgertables import TOP, ledger_table, total_tables

    title = f"Kept for backward by {case.scheme} on {case.model}, batch {case.batch_size}{settings} ({case.meter})"
    top = flags.top or (None if flags.everything else TOP)
    return *total_tables(ledger, top), ledger_table(ledger, title, top=top, everything=flags.everything)


def _as_json(listed: Sequence[tuple[Case, Ledger]]) -> str:
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
