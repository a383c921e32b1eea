"""Operators measured as an experiment: in this process, one after the other, each stored as soon as it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from actbench.experiments.experiment import ExperimentResult, finished, keep, pending
from actbench.experiments.recipes.sections import Planned
from actbench.experiments.runner.progress import Progress
from actbench.measuring.kernels import measure
from actbench.measuring.kernels.choices import Plan
from actbench.results.kernels import TIMED, TITLE, KernelCase, KernelRecord
from actbench.results.machine import provenance

RECIPE = "kernels"


def run(
    plan: Plan, output: Path | None, *, command: str, force: bool = False, progress: Progress | None = None
) -> ExperimentResult[KernelRecord]:
    """Measure the operators of a plan that the results file does not hold yet.

    ``output`` is a folder, in which ``kernels/MACHINE.kernels.jsonl`` is written with its tables beside it; a
    ``.jsonl`` file; or None to keep no file. ``progress`` is told what happens.

    Raises:
        MeasurementError: The device is not there.
        StoreError: The results file is in use, broken or cannot be written.
    """
    measure.device_named(plan.device)
    told, origin = progress or Progress(), provenance(command)
    planned = [Planned(case) for case in measure.cases(plan)]
    with TIMED.opened(RECIPE, output) as store:
        todo = pending(planned, store, told, force=force)
        outcomes = measure.outcomes(_started(todo, told), plan.seconds)
        summary = keep(outcomes, KernelRecord, planned, store, told, recipe=RECIPE, origin=lambda case: origin)
        return finished(TIMED, store, planned, summary, TITLE, output)


def _started(cases: list[KernelCase], progress: Progress) -> Iterator[KernelCase]:
    for case in cases:
        progress.started(case)
        yield case
