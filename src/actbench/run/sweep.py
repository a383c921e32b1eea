"""A whole comparison as one call: check the recipe, run its unfinished cases, write the tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from actbench import scheme as schemes, workload as workloads
from actbench.machine import machine
from actbench.measuring import meters
from actbench.model.measured import MeasuredRecord
from actbench.model.modelspecs import is_function
from actbench.model.records import Case
from actbench.report import kinds, store
from actbench.report.kinds import MEASURED
from actbench.run import runner, tasks
from actbench.run.executor import Machines, bench_of
from actbench.run.experiment import ExperimentResult, check_distinct, finished
from actbench.run.local import ThisMachine, chosen_gpus
from actbench.run.processes import ForkServer
from actbench.run.progress import Progress
from actbench.run.recipes import Recipe, files_of
from actbench.run.recipes.sections import Planned
from actbench.run.stored import WithTimelines, canonical
from actbench.scheme.facets import Spread
from actbench.simulator import profiles
from actbench.units import GIB
from actbench.workload import lookup as workload_lookup

_LOOKUP_BYTES: Final = 4 * GIB
"""Memory that reading a config may take, with a batch of one sample."""


def looked_up_by(server: ForkServer, timeout_seconds: float | None) -> Callable[[Case], object]:
    """Return what looks up the model of a case in a process that a server forks, within limits of time and memory.

    A config, or a file of Python, that others wrote is read there.
    """
    at_work = tasks.Tasks(workload_lookup.__name__, server=server)

    def look_up(case: Case) -> None:
        most = None if is_function(case.model) else _LOOKUP_BYTES
        doing = f"reading the model {case.model!r}"
        at_work.call("look_up", case.model_dump_json(), doing=doing, timeout_seconds=timeout_seconds, memory_bytes=most)

    return look_up


def plan(
    recipe: Recipe, *, elsewhere: bool = False, look_up: Callable[[Case], object] = workloads.load_workload
) -> tuple[Planned[Case], ...]:
    """Return the cases of a recipe with every scheme and model name checked and in canonical form.

    Devices of meters are looked for unless other machines measure. ``look_up`` raises where there is no such model.

    Raises:
        SpecError: A scheme does not exist or a value of it is wrong.
        ModelError: A model does not exist.
        UsageError: A device profile does not exist.
        RecipeError: Two rows are the same scheme, written in two ways.
        MeasurementError: The device of a meter is not there.
    """
    written_cases = recipe.cases()
    for meter in () if elsewhere else dict.fromkeys(entry.case.meter for entry in written_cases):
        meters.check_meter(meter)
    spelled = {text: schemes.build(text).spec for text in dict.fromkeys(entry.case.scheme for entry in written_cases)}
    planned = tuple(canonical(entry, spelled[entry.case.scheme]) for entry in written_cases)
    check_distinct(recipe.name, written_cases, planned)
    for case in dict.fromkeys(_workload_of(entry.case) for entry in planned):
        look_up(case)
    for case in {(entry.case.device_profile, entry.case.torch_era): entry.case for entry in planned}.values():
        if case.device_profile is not None:
            profiles.of_case(case)
    return planned


def _workload_of(case: Case) -> Case:
    """Return a case that stands for all that have its model, fed in the same way."""
    return case.model_copy(update={"scheme": "exact", "batch_size": 1, "seed": 0, "find_largest_batch": False})


def run_sweep(
    recipe: Recipe,
    output: Path | None,
    *,
    command: str,
    jobs: int | None = None,
    timeout_seconds: float | None,
    force: bool = False,
    retry_failed: bool = False,
    timelines: bool = False,
    progress: Progress | None = None,
    machines: Machines | None = None,
    server: ForkServer | None = None,
) -> ExperimentResult[MeasuredRecord]:
    """Measure the cases of a recipe that the results file does not hold yet.

    ``output`` is a folder, in which ``RECIPE/MACHINE.jsonl`` is written with its tables beside it; a ``.jsonl`` file;
    or None to keep no file. With ``timelines`` measurements have the memory over the step, and cases whose records lack
    it are measured again. ``jobs`` is how many simulated cases run at a time, one a core unless given, and how many
    GPUs measure side by side, one unless given. ``machines`` measure in place of this one. The other arguments are
    those of :func:`actbench.run.runner.run_plan`.

    Raises:
        UsageError: The recipe names something that does not exist, or the machines are of no use for it.
        StoreError: The results file is in use, broken or cannot be written.
    """
    elsewhere = machines is not None and machines.elsewhere
    progress = progress or Progress()
    look_up = looked_up_by(server, timeout_seconds) if server else workloads.load_workload
    planned = plan(recipe, elsewhere=elsewhere, look_up=look_up)
    if machines is None:
        has_gpus = any(entry.case.meter == "cuda" for entry in planned)
        machines = ThisMachine(chosen_gpus(jobs, progress) if has_gpus else (None,), server=server)
    machines.check([entry.case for entry in planned], _processes)
    with MEASURED.opened(recipe.name, output, of_any_machine=elsewhere) as opened:
        summary = runner.run_plan(
            planned,
            WithTimelines(opened) if timelines else opened,
            recipe=recipe.name,
            command=command,
            jobs=jobs or machine().cores,
            machines=machines,
            needed=_processes,
            timeout_seconds=timeout_seconds,
            force=force,
            retry_failed=retry_failed,
            progress=progress,
            bench=bench_of(timelines=timelines),
        )
        return finished(MEASURED, opened, planned, summary, recipe.title, output)


def _processes(case: Case) -> int:
    """Return how many processes train together in a case."""
    spread = schemes.build(case.scheme).facet(Spread)
    return math.prod(spread.axes.values()) if spread else 1


def render_again(folder: Path) -> list[Path]:
    """Write the tables beside every results file below a folder anew, and return the files."""
    done: list[Path] = []
    for kind in kinds.usable():
        files = kinds.files_below(folder, kind.name)
        for file in files:
            recipe = file.parent.name
            of_recipe = files_of(recipe)
            title = kind.title or (of_recipe.title(recipe) if of_recipe else recipe)
            kind.write_beside(file, store.read_results(file, kind.record).records, title)
        done += files
    return done
