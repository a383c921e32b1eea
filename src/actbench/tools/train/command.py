from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from actbench.cli.app import Exit, argument, command, count_option, named, option, path_named, seconds_option
from actbench.cli.flags import OutputOption, SchemeOption, TrustRecipeOption, expanded
from actbench.cli.printing import ExportFlags, ProgressFlags, command_line, export, finish, progress_shown, remark
from actbench.cli.schemeargs import checked_schemes, schemes_from
from actbench.errors import UsageError

if TYPE_CHECKING:
    from actbench.run.experiment import ExperimentResult
    from actbench.tools.train import recipe as runs
    from actbench.tools.train.processes import ProcessGroup
    from actbench.tools.train.records import TrainingRun

_MOST_SECONDS_TO_TELL = 10.0  # time for the first of several processes to start and report the error

RecipeArgument = Annotated[
    str, argument("[RECIPE]", "A training recipe's name or .toml file; without it, the recipe digits.", named)
]
SeedsOption = Annotated[
    str | None, option("--seeds", "Train each scheme once for each seed: 0-4, or 0,1,2.", metavar="RANGE")
]
StepsOption = Annotated[int | None, count_option("--steps", "Steps of a run, in place of the recipe's epochs.")]
DeviceOption = Annotated[str | None, option("--device", "cpu, cuda or auto: a GPU if there is one.")]
CurvesOption = Annotated[
    list[Path] | None,
    option(
        "--export-curves",
        "Draw the curves into FILE.png, FILE.svg or FILE.html.",
        only_typed=True,
        metavar="FILE",
        parser=path_named,
    ),
]
ForceOption = Annotated[
    bool,
    option("--force", "Train again, from the beginning, the runs that the file already holds.", only_typed=True),
]
CheckpointOption = Annotated[float, seconds_option("--checkpoint-seconds", "Time between checkpoints of a run.")]


@command(rank=60, extras={"train": "the data set digits", "datasets": "data sets of the hub"})
@expanded
def train(
    *,
    recipe: RecipeArgument = "digits",
    scheme: SchemeOption = None,
    seeds: SeedsOption = None,
    steps: StepsOption = None,
    device: DeviceOption = None,
    checkpoint_seconds: CheckpointOption = 30.0,
    force: ForceOption = False,
    trust_recipe: TrustRecipeOption = False,
    progress: ProgressFlags,
    output: OutputOption = Path("results"),
    exports: ExportFlags,
    export_curves: CurvesOption = None,
) -> None:
    """Train a model with each scheme, and compare the quality of the trained models.

    Runs of one seed begin with the same weights and see the same data in the same order. Each run is stored as soon as
    it ends, in OUTPUT/RECIPE/MACHINE.runs.jsonl, with the table in that folder. Run the same command again to continue
    where it stopped, even in the middle of a run: the curve is bit for bit the one of an uninterrupted run.

    Exit status: 0 all runs trained, 1 some run failed, 2 wrong usage.

    Examples:

    actbench train

    actbench train digits --seeds 0-4 --export-curves curves.svg

    actbench train mine.toml --steps 300 -s exact -s fewbit:2

    accelerate launch --multi_gpu --num_processes 4 -m actbench train mine.toml
    """
    from actbench.tools.train.recipe import TrainingRecipe

    wanted = checked_schemes(scheme or [], "--scheme")

    def chosen() -> runs.TrainingRecipe:
        read = TrainingRecipe.load_to_run(recipe, trusted=trust_recipe)
        _check_curves(export_curves or [])  # before a long training
        return read.with_flags({"seeds": seeds, "steps": steps, "device": device}, wanted)

    def compared(recipe: runs.TrainingRecipe, group: ProcessGroup) -> ExperimentResult[TrainingRun]:
        from actbench.tools.train import comparison

        goes_on = "; what ended is stored, and the same command goes on from the last checkpoint"
        with progress_shown(goes_on, progress, silent=not group.is_first, as_bar=True) as shown:
            return comparison.run(
                recipe,
                output or Path("results"),
                command=command_line(),
                force=force,
                checkpoint_seconds=checkpoint_seconds,
                progress=shown,
                group=group,
            )

    def kept(recipe: runs.TrainingRecipe) -> ExperimentResult[TrainingRun] | None:
        from actbench.tools.train.tables import stored_runs

        with progress_shown("", progress, as_bar=True) as shown:
            return None if force else stored_runs(recipe, output or Path("results"), shown)

    with schemes_from("--scheme" if scheme else recipe):
        title, comparison = _run_together(chosen, kept, compared)
    _show(comparison, title, exports, export_curves or [])


def _run_together(
    chosen: Callable[[], runs.TrainingRecipe],
    kept: Callable[[runs.TrainingRecipe], ExperimentResult[TrainingRun] | None],
    compared: Callable[[runs.TrainingRecipe, ProcessGroup], ExperimentResult[TrainingRun]],
) -> tuple[str, ExperimentResult[TrainingRun]]:
    """Run a comparison with the other processes, unless all runs of a single one are stored; the first returns."""
    from actbench.measuring.rank import is_first
    from actbench.tools.train import launch

    try:
        place = launch.read(os.environ)
    except UsageError:
        if is_first(os.environ):
            raise
        time.sleep(_MOST_SECONDS_TO_TELL)
        raise Exit(2) from None
    early = chosen() if place.size == 1 else None  # first, as importing torch takes seconds
    if early is not None and not place.cpu and (found := kept(early)) is not None:
        return early.title, found
    from actbench.tools.train.processes import StoppedError, joined

    try:
        with joined(place) as group:
            recipe = early or group.all_succeed(chosen)
            comparison = compared(recipe, group)
    except StoppedError:
        time.sleep(_MOST_SECONDS_TO_TELL)
        raise Exit(2) from None
    if not place.is_first:
        raise Exit(0)
    return recipe.title, comparison


def _check_curves(files: list[Path]) -> None:
    from actbench.cli.timeline import curve_formats
    from actbench.report.render import exports

    formats = curve_formats() if files else {}
    for file in files:
        exports.check_writable(file)
        if file.suffix not in formats:
            raise UsageError(f"--export-curves {file}: name a file that ends in {', '.join(formats)}")
        formats[file.suffix].check(file.suffix)


def _show(comparison: ExperimentResult[TrainingRun], title: str, asked: ExportFlags, curves: list[Path]) -> None:
    """Print and export curves and table, say where they are stored, and exit with status 1 if any run failed."""
    from actbench.cli.timeline import curve_formats
    from actbench.report.exporting import Exported
    from actbench.report.render import exports
    from actbench.report.render.formats import json_lines
    from actbench.tools.train.tables import accuracy_table

    records = comparison.records
    table = accuracy_table(records, title)
    export(asked, [table], lambda: json_lines(records), records=records)
    drawn = Exported([table], title, records, remark)
    exports.export({path: curve_formats()[path.suffix].text(path.suffix, drawn) for path in curves})
    finish(comparison, [table], "train", beside=asked)
