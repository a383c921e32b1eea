"""Training runs that are all stored: they are shown without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from actbench.machine import machine
from actbench.run.experiment import ExperimentResult
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned
from actbench.run.stored import stored_rows
from actbench.tools.train.recipe import TrainingRecipe
from actbench.tools.train.records import DeviceName, TrainingCase, TrainingRun
from actbench.tools.train.tables import TRAINED


def results(recipe: TrainingRecipe, output: Path, progress: Progress) -> ExperimentResult[TrainingRun] | None:
    """Return the result of a recipe whose runs all have rows; None where one may be left to train.

    Args:
        recipe: What to compare, by one process.
        output: As of :func:`actbench.tools.train.comparison.run`.
        progress: Told what is stored.
    """
    auto: DeviceName = "cpu" if machine().gpu is None else "cuda"
    return stored_rows(
        TRAINED, _canonical, recipe.name, recipe.title, lambda: recipe.runs(auto), output, progress=progress
    )


def _canonical(entry: Planned[TrainingCase], scheme: str) -> Planned[TrainingCase]:
    return replace(entry, case=entry.case.model_copy(update={"scheme": scheme}))
