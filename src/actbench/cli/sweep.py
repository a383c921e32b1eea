from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from actbench.cli.app import (
    ForceOption,
    JobsOption,
    ModelArgument,
    OutputOption,
    RetryOption,
    TimeoutOption,
    TrustRecipeOption,
    app,
    argument,
    named,
    option,
)
from actbench.cli.flags import CaseFlags, ExportFlags, default_meter, expanded, schemes_from
from actbench.cli.ledger import list_saved
from actbench.cli.printing import export_results, finish, run_shown
from actbench.errors import UsageError

if TYPE_CHECKING:
    from actbench.experiment import Comparison
    from actbench.recipe import Recipe

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
    jobs: JobsOption = None,
    timeout: TimeoutOption = 1800.0,
    force: ForceOption = False,
    retry_failed: RetryOption = False,
    trust_recipe: TrustRecipeOption = False,
    output: OutputOption = Path("results"),
    exports: ExportFlags,
) -> None:
    """Measure a grid of models, batch sizes and schemes, and print the comparison.

    Each case runs in a process of its own, and its row is stored as soon as it ends, in
    OUTPUT/RECIPE/MACHINE.jsonl, with the tables beside it. Run the same command again and it goes on where it was
    stopped. A case that runs out of memory, takes too long or crashes is a row with the reason.

    Exit status: 0 all cases measured, 1 some case failed, 2 wrong usage.

    Examples:

    actbench sweep

    actbench sweep resnet50 --scheme checkpoint --scheme offload --batch-size 32-256*2

    actbench sweep roberta-base -s fewbit:3 -s randomized:0.2 --max-batch --memory-limit 16GiB

    actbench sweep mine.toml --meter cuda --export-markdown table.md
    """
    recipe = _recipe("quickstart" if target is None else target, flags, trust_recipe)
    with schemes_from(flags.scheme_flags or target or recipe.name):
        comparison = run_shown(recipe, output, jobs=jobs, timeout=timeout, force=force, retry_failed=retry_failed)
    _show(comparison, recipe.title, exports)


@app.command()
@expanded
def measure(
    *,
    model: ModelArgument,
    flags: CaseFlags,
    timeout: TimeoutOption = 1800.0,
    ledger: LedgerOption = False,
    output: OutputOption = None,
    exports: ExportFlags,
) -> None:
    """Measure one model with a scheme beside the exact model.

    Nothing is stored unless --output names a folder or a .jsonl file. Exit status as for sweep. With --ledger nothing
    is measured: every tensor that the schemes (or else the exact model) save for backward is listed.

    Examples:

    actbench measure roberta-base --scheme fewbit:3 --batch-size 32

    actbench measure resnet50 -s checkpoint --meter cpu --batch-size 4 --image-size 128

    actbench measure train.py:build -s randomized:0.2

    actbench measure roberta-base -s fewbit:3 --ledger --export-csv ledger.csv
    """
    recipe = _recipe_of(model, flags)
    if ledger:
        if output is not None or flags.max_batch:
            raise UsageError(
                "--ledger measures nothing: leave out --output and --max-batch; --export-csv and the like do"
            )
        with schemes_from(flags.scheme_flags):
            list_saved(recipe, exports, exact="exact" in (flags.schemes or ["exact"]))
        return
    with schemes_from(flags.scheme_flags):
        comparison = run_shown(recipe, output, jobs=None, timeout=timeout, force=True)
    _show(comparison, recipe.title, exports)


def _show(comparison: Comparison, title: str, exports: ExportFlags) -> None:
    from actbench import tables

    shown = tables.report_tables(comparison.records, title)
    export_results(shown[0], comparison.records, *exports.files)
    finish(comparison, shown)


def _recipe(target: str, flags: CaseFlags, trusted: bool) -> Recipe:
    """Return the recipe that a target names, with the flags in place of what it says."""
    from actbench import recipe, runs

    if target in (*recipe.names(), *runs.names()) or target.endswith(".toml"):
        return recipe.Recipe.load_to_run(target, trusted=trusted).with_flags(
            flags.workload, flags.measure, flags.schemes
        )
    return _recipe_of(target, flags)


def _recipe_of(model: str, flags: CaseFlags) -> Recipe:
    """Return the recipe of one model; the search for the largest batch starts where most fit."""
    from actbench.recipe import Recipe

    workload = {"batch_size": "1" if flags.max_batch else "8", **flags.workload, "model": model}
    return Recipe.from_flags(workload, {"meters": [default_meter()], **flags.measure}, flags.schemes)
