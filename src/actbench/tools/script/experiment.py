"""A user's training script as an experiment: unchanged, and with schemes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

from actbench import scheme as schemes
from actbench.errors import UsageError
from actbench.machine import machine
from actbench.measuring import meters
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case
from actbench.report.kinds import MEASURED
from actbench.run import runner
from actbench.run.experiment import ExperimentResult, check_distinct, finished
from actbench.run.local import ThisMachine
from actbench.run.printed import passed_on
from actbench.run.processes import ForkServer
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned
from actbench.scheme.base import Change
from actbench.simulator import profiles
from actbench.tools.script.declared import BENCH, name_and_title, written

APPLIED: Final[frozenset[Change]] = frozenset(("saved tensors", "recomputation", "parameters", "loss", "optimizer"))
"""What schemes may change in a script, whose own lines set everything else."""


def plan(case: Case, specs: Sequence[str]) -> tuple[Planned[Case], ...]:
    """Return the cases of a script: unchanged, and with each scheme in its canonical form.

    Raises:
        SpecError: A scheme does not exist or a value of it is wrong.
        UsageError: A scheme changes what a script does itself, or a device profile does not exist.
        RecipeError: Two schemes are the same, written in two ways.
        MeasurementError: The device of the meter is not there.
    """
    meters.check_meter(case.meter)
    if case.meter == "simulated":
        profile = case.device_profile or profiles.DEFAULT
        profiles.get(profile)
        case = case.model_copy(update={"device_profile": profile})
    asked = written(case, specs)
    found = tuple(replace(each, case=_canonical(each.case)) for each in asked)
    check_distinct(case.model, asked, found)
    return found


def _canonical(case: Case) -> Case:
    scheme = schemes.build(case.scheme)
    if others := sorted(set(scheme.changes) - APPLIED):
        raise UsageError(
            f"--scheme {case.scheme} changes {' and '.join(others)}, which a script sets in its own lines: "
            f"change the script, and give here schemes that change {', '.join(sorted(APPLIED))} ('actbench schemes')"
        )
    return case.model_copy(update={"scheme": scheme.spec})


def run(
    case: Case,
    specs: Sequence[str],
    output: Path | None,
    *,
    command: str,
    timeout_seconds: float | None,
    force: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
    printed: tuple[TextIO, TextIO] | None = None,
    server: ForkServer | None = None,
    bench: str = BENCH,
) -> ExperimentResult[MeasuredRecord]:
    """Run a script unchanged, and with each scheme, as far as the results file does not hold it yet.

    Args:
        case: The unchanged script.
        specs: The schemes to compare it with.
        output: As for :func:`actbench.run.sweep.run_sweep`.
        command: What the user can type to have the same, for the records.
        timeout_seconds: Time that each may take; None is without end.
        force: Whether to run what the results file holds as well.
        retry_failed: Whether to run again what it holds and failed.
        progress: Told what happens.
        printed: Where standard output and error of the unchanged script go while it runs; None for nowhere.
        server: One of ``bench`` that was started before; one is started unless given.
        bench: The module that runs scripts.

    Raises:
        UsageError: As of :func:`plan`.
        StoreError: The results file is in use, broken or cannot be written.
    """
    planned = plan(case, specs)
    name, title = name_and_title(case, specs)
    with MEASURED.opened(name, output) as opened, passed_on(*printed) if printed else nullcontext() as folder:
        summary = runner.run_plan(
            planned,
            opened,
            recipe=name,
            command=command,
            jobs=machine().cores,
            machines=ThisMachine(server=server),
            timeout_seconds=timeout_seconds,
            force=force,
            retry_failed=retry_failed,
            progress=progress,
            bench=bench,
            preload=(),
            printed=None if folder is None else str(folder),
        )
        return finished(MEASURED, opened, planned, summary, title, output)
