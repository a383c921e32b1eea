"""The verbs sweep and measure; and ``measure --ledger``: every tensor that is saved for backward."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from actbench.cli.app import LARGEST, app, argument, named, option
from actbench.cli.flags import (
    CaseFlags,
    ModelArgument,
    OutputOption,
    RequireFitOption,
    TimeoutOption,
    TrustRecipeOption,
    expanded,
    schemes_from,
)
from actbench.cli.outputs import ExportFlags, ResultFlags
from actbench.cli.printing import call_task, command_line, export, finish, progress_shown, show
from actbench.errors import ModelError, UsageError
from actbench.results.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from actbench.experiments.recipes import Recipe
    from actbench.results.ledger import Ledger
    from actbench.results.records import Case
    from actbench.results.tables import Table

LedgerOption = Annotated[
    bool,
    option("--ledger", "In place of measuring, list every tensor that is saved for backward, on fake tensors."),
]
RecipeOrModel = Annotated[
    str | None,
    argument("[RECIPE|MODEL]", "A recipe's name or .toml file, or a model; without it, the recipe quickstart.", named),
]


@app.command()
@expanded
def sweep(
    *,
    target: RecipeOrModel = None,
    flags: CaseFlags,
    jobs: Annotated[
        int | None, option("--jobs -j", "Simulated cases that run at a time (default: one a core).", min=1, max=LARGEST)
    ] = None,
    timeout: TimeoutOption = 1800.0,
    force: Annotated[bool, option("--force", "Measure again what the results file already holds.")] = False,
    retry_failed: Annotated[bool, option("--retry-failed", "Measure again the rows of that file that failed.")] = False,
    trust_recipe: TrustRecipeOption = False,
    cumulative: Annotated[
        bool,
        option("--cumulative", "Add the schemes one after the other, and show what each one changes."),
    ] = False,
    require_fit: RequireFitOption = False,
    output: OutputOption = Path("results"),
    exports: ResultFlags,
) -> None:
    """Measure a grid of models, batch sizes and schemes, and print the comparison.

    Each case runs in a process of its own, and its row is stored as soon as it ends, in
    OUTPUT/RECIPE/MACHINE.jsonl, with the tables beside it. Run the same command again and it goes on where it was
    stopped. A case that takes too long, crashes or runs out of a device's memory is a row with the reason; one that
    is measured and only needs more memory than it may use is a row with all its numbers and by how much it is over.

    Exit status: 0 all cases measured, 1 some case failed (with --require-fit: or is over its limit), 2 wrong usage.

    Examples:

    actbench sweep

    actbench sweep resnet50 --scheme checkpoint --scheme offload --batch-size 32-256*2

    actbench sweep roberta-base -s fewbit:3 -s randomized:0.2 --max-batch --memory-limit 16GiB

    actbench sweep llama-3.2-1b -s checkpoint -s adam8bit -s chunked_loss:8 --cumulative --columns peak,peak-vs-previous

    actbench sweep mine.toml --meter cuda --export-markdown table.md
    """
    recipe = _recipe("quickstart" if target is None else target, flags, trust_recipe, cumulative)
    with _recipe_hint(target), schemes_from(flags.scheme_flags or target or recipe.name):
        _compare(
            recipe,
            output,
            exports,
            jobs=jobs,
            timeout=timeout,
            force=force,
            retry_failed=retry_failed,
            require_fit=require_fit,
        )


@app.command()
@expanded
def measure(
    *,
    model: ModelArgument,
    flags: CaseFlags,
    timeout: TimeoutOption = 1800.0,
    ledger: LedgerOption = False,
    require_fit: RequireFitOption = False,
    output: OutputOption = None,
    exports: ResultFlags,
) -> None:
    """Measure one model with a scheme beside the exact model.

    Nothing is stored unless --output names a folder or a .jsonl file. Exit status as for sweep. With --ledger nothing
    is measured: every tensor that the schemes (or else the exact model) save for backward is listed, in --timeout.

    Examples:

    actbench measure roberta-base --scheme fewbit:3 --batch-size 32

    actbench measure resnet50 -s checkpoint --meter cpu --batch-size 4 --image-size 128

    actbench measure train.py:build -s randomized:0.2

    actbench measure roberta-base -s fewbit:3 --ledger --export-csv ledger.csv
    """
    recipe = _recipe_of(model, flags)
    if ledger and (output is not None or flags.max_batch or exports.columns or require_fit):
        raise UsageError(
            "--ledger measures nothing: leave out --output, --max-batch, --columns and --require-fit; --export-csv and "
            "the like do"
        )
    with schemes_from(flags.scheme_flags):
        if ledger:
            _list_saved(recipe, exports, exact="exact" in (flags.schemes or ["exact"]), timeout=timeout)
        else:
            _compare(recipe, output, exports, timeout=timeout, force=True, require_fit=require_fit)


def _compare(
    recipe: Recipe,
    output: Path | None,
    exports: ResultFlags,
    *,
    timeout: float,
    force: bool,
    jobs: int | None = None,
    retry_failed: bool = False,
    require_fit: bool = False,
) -> None:
    """Run a recipe with its progress on standard error, and print and export the result."""
    from actbench import schemes
    from actbench.experiments import sweep
    from actbench.results.advice import about_limits
    from actbench.results.machine import machine
    from actbench.results.render.formats import json_lines
    from actbench.results.tables import report_tables

    columns = exports.chosen or recipe.columns
    kept = "; rows that were finished are stored, and the same command goes on from there" if output else ""
    with progress_shown(kept) as progress:
        comparison = sweep.run(
            recipe,
            output,
            command=command_line(),
            jobs=jobs or machine().cores,
            timeout_seconds=timeout,
            force=force,
            retry_failed=retry_failed,
            progress=progress,
        )
    shown = report_tables(comparison.records, recipe.title, columns)
    export(exports, shown[:1], lambda: json_lines(comparison.records))
    over = about_limits(comparison.records, schemes.changing)
    finish(comparison, shown, beside=exports, over_limit=over, require_fit=require_fit)


@contextmanager
def _recipe_hint(target: str | None) -> Iterator[None]:
    """Name the recipe that a target which is no model may be meant for."""
    from actbench.experiments.recipes import closest

    try:
        yield
    except ModelError as error:
        close = closest(target or "")
        if close is None:
            raise
        raise ModelError(f"{error}; or did you mean the recipe {close!r}?") from None


def _recipe(target: str, flags: CaseFlags, trusted: bool, cumulative: bool) -> Recipe:
    """Return the recipe that a target names, with the flags applied."""
    from actbench.experiments import recipes
    from actbench.experiments.recipes import runs

    if target in (*recipes.names(), *runs.names()) or target.endswith(".toml"):
        return recipes.Recipe.load_to_run(target, trusted=trusted).with_flags(
            flags.workload, flags.measure, flags.schemes, cumulative=cumulative
        )
    return _recipe_of(target, flags, cumulative)


def _recipe_of(model: str, flags: CaseFlags, cumulative: bool = False) -> Recipe:
    """Return the recipe of one model; the search for the largest batch starts where most fit."""
    from actbench.experiments.recipes import Recipe
    from actbench.results.machine import find_gpu

    workload = {"batch_size": "1" if flags.max_batch else "8", **flags.workload, "model": model}
    best = "cuda" if find_gpu() else "simulated"
    return Recipe.from_flags(workload, {"meters": [best], **flags.measure}, flags.schemes, cumulative=cumulative)


def _list_saved(recipe: Recipe, exports: ExportFlags, *, exact: bool, timeout: float) -> None:
    """List what each case of a recipe saves, and write what was asked for.

    Markdown and HTML have the tables as they are shown, CSV has all rows in one table, and JSON the ledgers with their
    cases. ``exact`` tells whether the exact model is listed; all cases share one process and ``timeout``.

    Raises:
        ActbenchError: A case cannot be built, its model needs values or ends its process, or they take too long.
    """
    from actbench.experiments import sweep
    from actbench.results.ledger import LedgerLine, lines_table

    cases = [entry.case for entry in sweep.plan(recipe) if exact or entry.case.scheme != "exact"]
    doing = f"listing what {recipe.name!r} keeps for backward"
    listed = list(zip(cases, _ledgers(cases, doing, timeout), strict=True))
    tables = [table for case, ledger in listed for table in _tables(case, ledger)]
    lines = [LedgerLine(case, saved) for case, ledger in listed for saved in ledger.entries]
    title = f"What is saved for backward: {recipe.name}"
    export(exports, tables, lambda: _as_json(listed), csv=lambda: lines_table(lines, title), title=title)
    show(*tables, beside=exports)


def _ledgers(cases: Sequence[Case], doing: str, timeout: float) -> list[Ledger]:
    from pydantic import TypeAdapter

    from actbench.experiments.runner.isolated import Tasks
    from actbench.experiments.runner.runner import BENCH, PRELOAD
    from actbench.results.ledger import Ledger
    from actbench.results.records import Case

    text = TypeAdapter(list[Case]).dump_json(list(cases)).decode()
    with Tasks(BENCH, PRELOAD) as tasks:
        answer = call_task(tasks, "itemize_all", text, doing=doing, timeout_seconds=timeout)
    return TypeAdapter(list[Ledger]).validate_json(answer)


def _tables(case: Case, ledger: Ledger) -> tuple[Table, Table]:
    from actbench.results.ledger import ledger_table, operators_table

    title = f"Kept for backward by {case.scheme} on {case.model}, batch {case.batch_size} ({case.meter})"
    return ledger_table(ledger, title), operators_table(ledger)


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
