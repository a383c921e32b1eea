"""A whole comparison as one call: check the recipe, run what is not done yet, write the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from actbench import schemes, workloads
from actbench.experiments.experiment import ExperimentResult, Kind, check_distinct
from actbench.experiments.recipes import Recipe, load, names
from actbench.experiments.recipes.sections import Planned
from actbench.experiments.runner import runner
from actbench.experiments.runner.progress import Progress
from actbench.measuring import meters
from actbench.measuring.meters import profiles
from actbench.results import store
from actbench.results.fits import FitRecord
from actbench.results.measured import MeasuredRecord
from actbench.results.records import Case
from actbench.results.tables import report_tables
from actbench.results.tables.fits import FIT_TITLE, fit_tables

FITTED = Kind(FitRecord, store.FITS_SUFFIX, fit_tables)
MEASURED = Kind(MeasuredRecord, ".jsonl", report_tables)
_WITH_TIMELINES = "actbench.measuring.timelines"
"""The module that measures cases with timelines; :data:`actbench.experiments.runner.runner.BENCH` has none."""


def plan(recipe: Recipe) -> tuple[Planned[Case], ...]:
    """Return the cases of a recipe with every scheme and model name checked and in canonical form.

    Raises:
        SpecError: A scheme does not exist or a value of it is wrong.
        ModelError: A model does not exist.
        UsageError: A device profile does not exist.
        RecipeError: Two rows are the same scheme, written in two ways.
        MeasurementError: The device of a meter is not there.
    """
    written_cases = recipe.cases()
    for meter in dict.fromkeys(entry.case.meter for entry in written_cases):
        meters.check(meter)
    spelled = {text: schemes.build(text).spec for text in dict.fromkeys(entry.case.scheme for entry in written_cases)}
    planned = tuple(_canonical(entry, spelled[entry.case.scheme]) for entry in written_cases)
    check_distinct(recipe.name, written_cases, planned)
    for case in dict.fromkeys(_workload_of(entry.case) for entry in planned):
        workloads.load(case)
    for profile in dict.fromkeys(entry.case.device_profile for entry in planned):
        if profile is not None:
            profiles.get(profile)
    return planned


def _workload_of(case: Case) -> Case:
    """Return a case that stands for all that have its model, fed in the same way."""
    return case.model_copy(update={"scheme": "exact", "batch_size": 1, "seed": 0, "find_largest_batch": False})


def run(
    recipe: Recipe,
    output: Path | None,
    *,
    command: str,
    jobs: int,
    timeout_seconds: float | None,
    force: bool = False,
    retry_failed: bool = False,
    timelines: bool = False,
    progress: Progress | None = None,
) -> ExperimentResult[MeasuredRecord]:
    """Measure the cases of a recipe that the results file does not hold yet.

    ``output`` is a folder, in which ``RECIPE/MACHINE.jsonl`` is written with its tables beside it; a ``.jsonl`` file;
    or None to keep no file. With ``timelines`` the cases that are measured now say where the memory is over their step,
    too. The other arguments are those of :func:`actbench.experiments.runner.runner.run`.

    Raises:
        UsageError: The recipe names something that does not exist.
        StoreError: The results file is in use, broken or cannot be written.
    """
    planned = plan(recipe)
    with MEASURED.opened(recipe.name, output) as opened:
        summary = runner.run(
            planned,
            opened,
            recipe=recipe.name,
            command=command,
            jobs=jobs,
            timeout_seconds=timeout_seconds,
            force=force,
            retry_failed=retry_failed,
            progress=progress,
            bench=_WITH_TIMELINES if timelines else runner.BENCH,
        )
        return MEASURED.finished(opened, planned, summary, recipe.title, output)


def render_again(folder: Path) -> list[Path]:
    """Write the tables beside every results file of sweeps and fits below a folder anew, and return the files."""
    fits = sorted(folder.rglob(f"*{store.FITS_SUFFIX}"))
    for file in fits:
        FITTED.write_beside(file, store.read(file, FitRecord).records, FIT_TITLE)
    files = store.files_in([folder])
    for file in files:
        title = load(file.parent.name).title if file.parent.name in names() else file.parent.name
        MEASURED.write_beside(file, store.read(file).records, title)
    return [*files, *fits]


def _canonical(entry: Planned[Case], spec: str) -> Planned[Case]:
    """Return a case as records have it: the scheme in its canonical form, the simulated device named."""
    profile = entry.case.device_profile or (profiles.DEFAULT if entry.case.meter == "simulated" else None)
    return replace(entry, case=entry.case.model_copy(update={"scheme": spec, "device_profile": profile}))
