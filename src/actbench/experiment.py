"""A whole comparison as one call: check the recipe, run what is not done yet, and render the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from actbench import meters, render, runner, schemes, tables, workloads
from actbench.errors import RecipeError
from actbench.machine import machine
from actbench.meters import profiles
from actbench.recipe import Recipe, load, names
from actbench.recipe.sections import PlannedCase
from actbench.records import Case, Record
from actbench.render import exports
from actbench.runner import Summary
from actbench.runner.progress import Progress
from actbench.store import Store, files_in, read, results_path

BESIDE = (".md", ".csv")
"""Suffixes of the tables beside a results file."""


@dataclass(frozen=True)
class Comparison:
    """What came of a recipe on this machine.

    Attributes:
        records: One for each case of the recipe, in its order, those of earlier runs included.
        summary: How many cases were measured, failed and skipped in this run.
        path: The results file, or None when none was kept.
        notice: What a user must know of how the results file was read, or None.
    """

    records: tuple[Record, ...]
    summary: Summary
    path: Path | None
    notice: str | None = None


def plan(recipe: Recipe) -> tuple[PlannedCase, ...]:
    """Return the cases of a recipe with every scheme and model name checked and written in its one canonical form.

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
    first: dict[str, PlannedCase] = {}
    for entry, written in zip(planned, written_cases, strict=True):
        other = first.setdefault(entry.case.key(), written)
        if other is not written:
            raise RecipeError(
                f"{recipe.name}: {other.case.scheme!r} and {written.case.scheme!r} are the same scheme; keep one"
            )
    for case in dict.fromkeys(_workload_of(entry.case) for entry in planned):
        workloads.load(case)
    for profile in dict.fromkeys(entry.case.device_profile for entry in planned):
        if profile is not None:
            profiles.get(profile)
    return planned


def _workload_of(case: Case) -> Case:
    """Return a case that stands for all that have its workload: the model and how it is fed, whatever the amounts."""
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
    progress: Progress | None = None,
) -> Comparison:
    """Measure the cases of a recipe that the results file does not hold yet.

    Args:
        recipe: What to compare.
        output: A folder, in which ``RECIPE/MACHINE.jsonl`` is written with its tables beside it; a ``.jsonl`` file;
            or None to keep no file.
        command: What a user types to have the same, for the records.
        jobs: How many simulated cases run at a time.
        timeout_seconds: Time that one case may work; None is without end.
        force: Measure again what the file holds.
        retry_failed: Measure again what failed.
        progress: Told what happens.

    Raises:
        UsageError: The recipe names something that does not exist.
        StoreError: The results file is in use, broken or cannot be written.
    """
    planned, here = plan(recipe), machine().identity
    with _opened(recipe, output) as store:
        summary = runner.run(
            planned,
            store,
            recipe=recipe.name,
            command=command,
            jobs=jobs,
            timeout_seconds=timeout_seconds,
            force=force,
            retry_failed=retry_failed,
            progress=progress,
        )
        held = {record.case.key(): record for record in store.records if record.machine.identity == here}
    records = tuple(held[key] for key in dict.fromkeys(entry.case.key() for entry in planned) if key in held)
    if output is not None:
        exports.export({store.path.with_suffix(suffix): text for suffix, text in texts(records, recipe.title).items()})
    return Comparison(records, summary, store.path if output is not None else None, store.notice)


def texts(records: Sequence[Record], title: str) -> dict[str, str]:
    """Return what stands beside a results file, by file suffix."""
    sections = tables.report_tables(records, title)
    rendered = "\n".join(map(render.markdown, sections)), render.csv_text(sections[0])
    return dict(zip(BESIDE, rendered, strict=True))


def render_again(folder: Path) -> list[Path]:
    """Write the tables beside every results file below a folder anew, and return the files.

    Raises:
        StoreError: A file cannot be read or written, or the folder holds none.
    """
    files = files_in([folder])
    for file in files:
        records = read(file).records
        title = load(file.parent.name).title if file.parent.name in names() else file.parent.name
        exports.export({file.with_suffix(suffix): text for suffix, text in texts(records, title).items()})
    return files


def _canonical(entry: PlannedCase, spec: str) -> PlannedCase:
    """Return a case as records have it: the scheme in its one spelling, the simulated device named."""
    profile = entry.case.device_profile or (profiles.DEFAULT if entry.case.meter == "simulated" else None)
    return replace(entry, case=entry.case.model_copy(update={"scheme": spec, "device_profile": profile}))


@contextmanager
def _opened(recipe: Recipe, output: Path | None) -> Iterator[Store]:
    if output is None:
        with TemporaryDirectory(prefix="actbench-") as folder, Store.open_for_sweep(Path(folder) / "r.jsonl") as store:
            yield store
    else:
        file = output if output.suffix == ".jsonl" else results_path(output, recipe.name, machine().name)
        for suffix in BESIDE:
            exports.check(file.with_suffix(suffix))
        with Store.open_for_sweep(file, machine=machine()) as store:
            yield store
