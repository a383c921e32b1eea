"""The verbs sweep and measure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from actbench.cli import completions
from actbench.cli.app import Context, argument, command, count_option, named, option
from actbench.cli.caseflags import CaseFlags
from actbench.cli.clusters import GpuClusterFlags
from actbench.cli.flags import (
    ForceOption,
    ModelArgument,
    OutputOption,
    RequireFitOption,
    RetryFailedOption,
    TimeoutOption,
    TrustRecipeOption,
    expanded,
)
from actbench.cli.ledger import LedgerFlags, list_saved
from actbench.cli.printing import (
    LiveFlags,
    ProgressFlags,
    ResultFlags,
    command_line,
    export,
    finish,
    progress_shown,
    remark,
    show,
)
from actbench.cli.recipeargs import recipe_hint, recipe_of, recipe_of_target
from actbench.cli.schemeargs import schemes_from
from actbench.cli.timeline import TimelineFlags, export_again, export_timelines, show_timelines, tables_of
from actbench.errors import UsageError
from actbench.model.measured import MeasuredRecord
from actbench.model.modelspecs import is_function
from actbench.report.sentences import why_none
from actbench.report.tables import Table, report_tables

if TYPE_CHECKING:
    from actbench.run.executor import Machines
    from actbench.run.recipes import Recipe

TimeByOption = Annotated[
    Literal["operator"] | None,
    option(
        "--time-by",
        "operator: list the ten operators that take most of a step's estimated time, for exact and for each scheme.",
        show_default=False,
    ),
]
CumulativeOption = Annotated[bool, option("--cumulative", "Add the schemes one by one, and show what each changes.")]
RecipeOrModel = Annotated[
    str | None,
    argument(
        "[RECIPE|MODEL]",
        "A recipe's name or .toml file, or a model; without it, the recipe quickstart.",
        named,
        autocompletion=completions.recipes_and_models,
    ),
]


@command(
    rank=20,
    usual="--scheme --batch-size --meter --device-profile --max-batch --jobs --timeout --output --export-markdown "
    "--export-csv",
)
@expanded
def sweep(
    *,
    context: Context,
    target: RecipeOrModel = None,
    flags: CaseFlags,
    jobs: Annotated[
        int | None,
        count_option(
            "--jobs -j",
            "Simulated cases that run at a time (default: one a core), and GPUs of one kind that measure side by side "
            "(default: one).",
        ),
    ] = None,
    timeout: TimeoutOption = 1800.0,
    force: ForceOption = False,
    retry_failed: RetryFailedOption = False,
    nodes: GpuClusterFlags,
    trust_recipe: TrustRecipeOption = False,
    cumulative: CumulativeOption = False,
    require_fit: RequireFitOption = False,
    progress: LiveFlags,
    output: OutputOption = Path("results"),
    exports: ResultFlags,
) -> None:
    """Measure a grid of models, batch sizes and schemes, and print the comparison.

    Each case runs in its own process, and its row is stored as soon as it ends, in OUTPUT/RECIPE/MACHINE.jsonl, with
    the tables in the same folder. Run the same command again to continue where it stopped. A case that takes too long,
    crashes or runs out of a device's memory is a row with the reason. A measured case that needs more memory than it
    may use is a row with all its numbers and the excess.

    Exit status: 0 all cases measured, 1 some case failed (with --require-fit: or is over its limit), 2 wrong usage.

    Examples:

    actbench sweep

    actbench sweep resnet50 --scheme checkpoint --scheme offload --batch-size 32-256*2

    actbench sweep roberta-base -s fewbit:3 -s randomized:0.2 --max-batch --memory-limit 16GiB

    actbench sweep llama-3.2-1b -s checkpoint -s adam8bit -s chunked_loss:8 --cumulative --columns peak,peak-vs-previous

    actbench sweep llama-3.1-70b -s qlora:16 --no-exact -b 1 --sequence-length 512-4096*2 --device-profile h100-80gb

    actbench sweep mine.toml --meter cuda --export-markdown table.md

    actbench sweep finetune-8b --cluster ray://head:10001

    torchrun --nproc-per-node 4 -m actbench sweep mine.toml --meter cuda -s fsdp:4 -s ddp:4
    """
    with recipe_hint(target):
        name, elsewhere = "quickstart" if target is None else target, nodes.cluster is not None
        recipe = recipe_of_target(name, flags, trust_recipe, cumulative, elsewhere=elsewhere)
    with recipe_hint(target), schemes_from(flags.scheme_flags or target or recipe.name):
        _compare(
            recipe,
            output,
            exports,
            progress,
            jobs=jobs,
            timeout=timeout,
            force=force,
            retry_failed=retry_failed,
            require_fit=require_fit,
            machines=_machines(nodes, context.obj),
        )


@command(
    rank=30,
    usual="--scheme --batch-size --sequence-length --dtype --meter --device-profile --max-batch --infer --output",
)
@expanded
def measure(
    *,
    context: Context,
    model: ModelArgument,
    flags: CaseFlags,
    timeout: TimeoutOption = 1800.0,
    ledger: LedgerFlags,
    timeline: TimelineFlags,
    time_by: TimeByOption = None,
    cumulative: CumulativeOption = False,
    force: ForceOption = False,
    retry_failed: RetryFailedOption = False,
    require_fit: RequireFitOption = False,
    progress: ProgressFlags,
    output: OutputOption = None,
    exports: ResultFlags,
) -> None:
    """Measure one model with schemes, and compare them with the exact model.

    Nothing is stored unless --output names a folder or a .jsonl file. Rows that this file holds are not measured again,
    so the same command continues where it stopped; rows of file.py:function are, because the code of the function may
    have changed. Exit status as for sweep. With --ledger nothing is measured: it lists what the schemes (or else the
    exact model) save for backward, by module, operator, reason and tensor, within --timeout.

    Examples:

    actbench measure roberta-base --scheme fewbit:3 --batch-size 32

    actbench measure resnet50 -s checkpoint --meter cpu --batch-size 4 --image-size 128

    actbench measure llama-3.2-1b -s checkpoint -s adam8bit -s chunked_loss:8 --cumulative

    actbench measure llama-3.1-8b -s fsdp:8,mixed=bf16 -s zero1:8 --batch-size 1 --device-profile h100-80gb

    actbench measure train.py:build -s randomized:0.2

    actbench measure roberta-base -s fewbit:3 --ledger --top 50 --export-csv ledger.csv

    actbench measure resnet50 -s checkpoint -b 64 --meter simulated --device-profile rtx-4090 --time-by operator

    actbench measure roberta-base -s checkpoint --timeline --export-timeline memory.png --export-snapshot memory.pickle

    torchrun --nproc-per-node 4 -m actbench measure gpt2 -s fsdp:4 --meter cpu
    """
    recipe = recipe_of(model, flags, cumulative)
    timeline.check()
    if context.obj is not None and (timeline.export_snapshot or timeline.export_trace) is not None:
        flag = "--export-snapshot" if timeline.export_snapshot is not None else "--export-trace"
        raise UsageError(
            f"{flag} records one process, and several were launched: leave it out, or simulate by 'actbench "
            "measure --meter simulated', started alone"
        )
    with schemes_from(flags.scheme_flags):
        if ledger.ledger:
            with_exact = "exact" in (flags.schemes or ["exact"])
            list_saved(recipe, exports, ledger, progress, exact=with_exact, timeout=timeout)
        else:
            _compare(
                recipe,
                output,
                exports,
                progress,
                timeout=timeout,
                force=force or is_function(model),
                retry_failed=retry_failed,
                require_fit=require_fit,
                by_operator=bool(time_by),
                timeline=timeline,
                machines=context.obj,
            )


def _compare(
    recipe: Recipe,
    output: Path | None,
    exports: ResultFlags,
    flags: ProgressFlags,
    *,
    timeout: float,
    force: bool = False,
    jobs: int | None = None,
    retry_failed: bool = False,
    require_fit: bool = False,
    by_operator: bool = False,
    machines: Machines | None = None,
    timeline: TimelineFlags = TimelineFlags(),  # noqa: B008  (frozen)
) -> None:
    """Run a recipe with its progress on standard error, and print and export the result."""
    from actbench.report.render.formats import json_lines
    from actbench.run.executor import PRELOAD, bench_of
    from actbench.run.processes import ForkServer
    from actbench.run.stored import stored_results

    asked = (*recipe.asked_columns, *(["over-limit"] if require_fit else []))
    columns = tuple(dict.fromkeys([*names, *asked])) if (names := exports.chosen or recipe.shown_columns) else ()
    never_hidden = columns if exports.columns else tuple(dict.fromkeys(asked))
    goes_on = "" if force else ", and the same command goes on from there"
    kept = f"; rows that were finished are stored{goes_on}" if output else ""
    with progress_shown(kept, flags) as progress, ExitStack() as held:
        settled: Any = {"retry_failed": retry_failed, "timelines": timeline.wanted, "progress": progress}
        comparison = None
        if machines is None and not force:
            comparison = stored_results(recipe.name, recipe.title, recipe.cases, output, **settled)
        if comparison is None:
            # its imports and those of this process take seconds each: they go on side by side
            server = None if machines else held.enter_context(ForkServer(bench_of(timelines=timeline.wanted), PRELOAD))
            from actbench.run import sweep  # which imports torch

            comparison = sweep.run_sweep(
                recipe,
                output,
                command=command_line(),
                jobs=jobs,
                timeout_seconds=timeout,
                force=force,
                machines=machines,
                server=server,
                **settled,
            )
    records = comparison.records
    schemes = tuple(dict.fromkeys(each.case.scheme for each in records))
    shown = report_tables(records, recipe.title, columns, schemes, never_hidden)
    failed = why_none(records)
    if by_operator and not failed:
        shown = (*shown, *_operator_tables(records))
    written = (*shown[:1], *tables_of(records))
    export(exports, written, lambda: json_lines(records), records=records)
    for why in failed:
        remark(f"actbench: {why}")
    show(*(() if failed else shown), beside=exports, all_notes=flags.verbose)
    for note in without_effect(records):
        remark(note)
    show_timelines(records, exports)
    export_timelines(records, timeline)
    export_again(records, timeline, flags, timeout=timeout)
    finish(comparison, (), beside=exports, require_fit=require_fit)


def without_effect(records: Sequence[MeasuredRecord]) -> Iterator[str]:
    """Yield a sentence for each size that was asked for, where the input of no model has it."""
    built = [(each.case, found) for each in records if (found := getattr(each.outcome, "built", None)) and found.task]
    models = list(dict.fromkeys(case.model for case, _ in built))
    for size, what in (("sequence_length", "text"), ("image_size", "images")):
        asked = ", ".join(dict.fromkeys(str(value) for case, _ in built if (value := getattr(case, size))))
        if asked and all(getattr(found, size) is None for _, found in built):
            read = "read" if len(models) > 1 else "reads"
            yield f"{size.replace('_', ' ')} {asked} changes nothing: {', '.join(models)} {read} no {what}"


def _machines(nodes: GpuClusterFlags, launched: Machines | None) -> Machines | None:
    """Return what measures in place of this process alone: nodes of a cluster, or those launched together."""
    cluster = nodes.chosen
    if cluster is not None and launched is not None:
        raise UsageError("--cluster measures on its nodes, and several processes were launched: use one of the two")
    return launched or cluster


def _operator_tables(records: Sequence[MeasuredRecord]) -> list[Table]:
    """Return tables of the operators that take most time, for each case; a UsageError if no time was estimated."""
    from actbench.report.tables.step import operator_tables

    tables = operator_tables(records)
    if not tables:
        raise UsageError(
            "--time-by operator shows estimated times, and none was estimated: add --meter simulated and a "
            "--device-profile that 'actbench devices' marks est."
        )
    return tables
