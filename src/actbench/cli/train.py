from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from actbench.cli.app import (
    LARGEST,
    Exit,
    OutputOption,
    SchemeOption,
    TrustRecipeOption,
    app,
    argument,
    named,
    option,
    path_named,
)
from actbench.cli.flags import ExportFlags, expanded, schemes_from
from actbench.cli.printing import command_line, export_table, remark, show
from actbench.counts import LONGEST_SECONDS

if TYPE_CHECKING:
    from actbench import runs
    from actbench.learning.comparison import TrainingComparison
    from actbench.learning.team import Team

RecipeArgument = Annotated[
    str, argument("[RECIPE]", "A training recipe's name or .toml file; without it, the recipe digits.", named)
]
SeedsOption = Annotated[
    str | None, option("--seeds", "One run of each scheme for each seed: 0-4, or 0,1,2.", metavar="RANGE")
]
StepsOption = Annotated[
    int | None, option("--steps", "Steps of a run, in place of the recipe's epochs.", min=1, max=LARGEST)
]
DeviceOption = Annotated[str | None, option("--device", "cpu, cuda or auto: a GPU where there is one.")]
CurvesOption = Annotated[
    list[Path] | None,
    option("--export-curves", "Draw the curves into FILE.png or FILE.svg.", metavar="FILE", parser=path_named),
]
ForceOption = Annotated[
    bool, option("--force", "Train again, from the beginning, what the file of runs already holds.")
]
CheckpointOption = Annotated[
    float, option("--checkpoint-seconds", "Time between checkpoints of a run.", min=0, max=LONGEST_SECONDS)
]


@app.command()
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
    output: OutputOption = Path("results"),
    exports: ExportFlags,
    export_curves: CurvesOption = None,
) -> None:
    """Train a model with each scheme, and compare how well the trained models do.

    Runs of one seed begin with the same weights and see the same data in the same order. Each is stored as soon as it
    ends, in OUTPUT/RECIPE/MACHINE.runs.jsonl, with the table beside it. Run the same command again and it goes on
    where it was stopped, in the middle of a run too: the curve is bit for bit that of a run that was not stopped.

    Exit status: 0 all runs trained, 1 some run failed, 2 wrong usage.

    Examples:

    actbench train

    actbench train digits --seeds 0-4 --export-curves curves.svg

    actbench train mine.toml --steps 300 -s exact -s fewbit:2

    accelerate launch --multi_gpu --num_processes 4 -m actbench train mine.toml
    """
    from actbench.runs import TrainingRecipe

    def chosen() -> runs.TrainingRecipe:
        read = TrainingRecipe.load_to_run(recipe, trusted=trust_recipe)
        _check_pictures(export_curves or [])  # before an hour of training
        return read.with_flags({"seeds": seeds, "steps": steps, "device": device}, scheme or ())

    def compared(recipe: runs.TrainingRecipe, team: Team) -> TrainingComparison:
        return _run_shown(recipe, output or Path("results"), team, force=force, checkpoint_seconds=checkpoint_seconds)

    with schemes_from("--scheme" if scheme else recipe):
        title, comparison = _together(chosen, compared)
    _export(comparison, title, exports, export_curves or [])
    _finish(comparison, title)


def _together(
    chosen: Callable[[], runs.TrainingRecipe], compared: Callable[[runs.TrainingRecipe, Team], TrainingComparison]
) -> tuple[str, TrainingComparison]:
    """Run a comparison with the other processes, if there are any; of these the first one returns from it."""
    from actbench.errors import UsageError
    from actbench.runs import launch

    try:
        place = launch.read(os.environ)
    except UsageError:
        if launch.leads(os.environ):
            raise
        raise Exit(2) from None
    early = chosen() if place.size == 1 else None  # before torch is imported, which takes seconds
    from actbench.learning.team import StoppedError, joined

    try:
        with joined(place) as team:
            recipe = early or team.agreed(chosen)
            comparison = compared(recipe, team)
    except StoppedError:
        raise Exit(2) from None
    if not place.leads:
        raise Exit(0)
    return recipe.title, comparison


def _check_pictures(curves: list[Path]) -> None:
    from actbench.render import exports, pictures

    for path in curves:
        exports.check(path)
    if curves:
        pictures.check([path.suffix.removeprefix(".") for path in curves])


def _run_shown(
    recipe: runs.TrainingRecipe, output: Path, team: Team, *, force: bool, checkpoint_seconds: float
) -> TrainingComparison:
    from actbench.cli.watching import shown
    from actbench.learning import comparison

    try:
        with shown() if team.leads else nullcontext() as watcher:
            return comparison.run(
                recipe,
                output,
                command=command_line(),
                force=force,
                checkpoint_seconds=checkpoint_seconds,
                watcher=watcher,
                team=team,
            )
    except KeyboardInterrupt:
        if team.leads:
            remark("actbench: interrupted; what ended is stored, and the same command goes on from the last checkpoint")
        raise Exit(130) from None


def _export(comparison: TrainingComparison, title: str, asked: ExportFlags, curves: list[Path]) -> None:
    from actbench.render import exports, pictures
    from actbench.runs.curves import charts
    from actbench.runs.store import json_text
    from actbench.runs.table import accuracy_table

    markdown, csv, as_json, html = asked.files
    table = accuracy_table(comparison.runs, title)
    export_table(table, markdown, csv, as_json, json_text(comparison.runs), html)
    drawn = charts(comparison.runs)
    exports.export({path: pictures.picture(drawn, path.suffix.removeprefix(".")) for path in curves})


def _finish(comparison: TrainingComparison, title: str) -> None:
    """Print curves and table, say where they are kept, and leave with status 1 if any run failed."""
    from rich.console import Console

    from actbench.records import Failure
    from actbench.render.curves import drawn
    from actbench.runs.curves import charts
    from actbench.runs.table import accuracy_table

    console = Console(highlight=False)
    for chart in charts(comparison.runs):
        console.print(drawn(chart, min(console.width, 100)), "")
    show(accuracy_table(comparison.runs, title))
    if comparison.notice:
        remark(comparison.notice)
    failed = [run for run in comparison.runs if isinstance(run.outcome, Failure)]
    remark(f"{comparison.trained} trained now, {len(comparison.runs) - comparison.trained} taken from the file")
    remark(f"runs: {comparison.path} (the table beside it, as .md and .csv)")
    for run in failed:
        assert isinstance(run.outcome, Failure)
        remark(f"failed: {run.case.model}, {run.case.scheme}, seed {run.case.seed}: {run.outcome.message}")
    if failed:
        raise Exit(1)
