"""A whole comparison of training runs as one call: check the recipe, train what is not done yet, write the tables."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from actbench import bench, render, runs, schemes
from actbench.errors import RecipeError, StoreError, UsageError
from actbench.foreign import boundary
from actbench.learning.checkpoint import CheckpointFolder
from actbench.learning.loop import TrainingLoop
from actbench.learning.team import ALONE, LostError, StoppedError, Team
from actbench.machine import machine, versions
from actbench.meters import cuda
from actbench.records import Failure
from actbench.render import exports
from actbench.runs.records import Trained, TrainingCase, TrainingRun
from actbench.runs.sections import PlannedRun
from actbench.runs.store import RunStore, runs_path
from actbench.runs.table import accuracy_table

CHECKPOINT_SECONDS = 30.0


class Watcher(Protocol):
    """Told what happens in a comparison."""

    def planned(self, runs: int, done_before: int) -> None:
        """So many runs will be trained, and so many stand in the file already."""
        ...

    def started(self, case: TrainingCase, steps: int, done: int) -> None:
        """A run starts; ``done`` of its steps were taken before it was stopped last time."""
        ...

    def stepped(self, done: int, loss: float) -> None:
        """One more step was taken."""
        ...

    def finished(self, run: TrainingRun) -> None:
        """A run ended and is stored."""
        ...


class Unwatched:
    """A watcher that says nothing."""

    def planned(self, runs: int, done_before: int) -> None:
        """Say nothing."""

    def started(self, case: TrainingCase, steps: int, done: int) -> None:
        """Say nothing."""

    def stepped(self, done: int, loss: float) -> None:
        """Say nothing."""

    def finished(self, run: TrainingRun) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class TrainingComparison:
    """What came of a training recipe on this machine.

    Attributes:
        runs: One for each case of the recipe, in its order, those of earlier calls included.
        trained: How many were trained now.
        path: The file of runs, or None when none was kept.
        notice: What a user must know of how the file was read, or None.
    """

    runs: tuple[TrainingRun, ...]
    trained: int
    path: Path | None
    notice: str | None = None


def plan(recipe: runs.TrainingRecipe, team: Team = ALONE) -> tuple[PlannedRun, ...]:
    """Return the runs of a recipe, every name in it checked and the schemes in their one canonical form.

    Args:
        recipe: What to compare.
        team: The processes that each run is trained by.

    Raises:
        UsageError: A model, data set or scheme does not exist, or they do not go together.
        MeasurementError: The device is not there.
    """
    together = {"processes": team.size, "strategy": team.launch.strategy}
    written = recipe.runs(team.device)
    if any(run.case.device == "cuda" for run in written):
        cuda.check("--device", "cpu")
    planned = tuple(replace(run, case=_canonical(run.case, together)) for run in written)
    keys = [run.case.key() for run in planned]
    for place, key in enumerate(keys):
        if key in keys[:place]:
            first, second = written[keys.index(key)].case.scheme, written[place].case.scheme
            raise RecipeError(f"{recipe.name}: {first!r} and {second!r} are the same scheme; keep one")
    for case in dict.fromkeys(run.case.model_copy(update={"scheme": "exact", "seed": 0}) for run in planned):
        with boundary(f"model {case.model!r} cannot be trained"):
            TrainingLoop(case, team).check()
    return planned


def run(
    recipe: runs.TrainingRecipe,
    output: Path | None,
    *,
    command: str,
    force: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    watcher: Watcher | None = None,
    team: Team = ALONE,
) -> TrainingComparison:
    """Train the runs of a recipe that the file does not hold yet, one behind the other in this process.

    A run that was stopped goes on from its last checkpoint, and its curve is bit for bit that of one that was not. A
    run that fails becomes a record with the reason, and the others go on.

    Args:
        recipe: What to compare.
        output: A folder, in which ``RECIPE/MACHINE.runs.jsonl`` is written with its table beside it; a ``.jsonl``
            file; or None to keep nothing.
        command: What a user types to have the same, for the records.
        force: Train again what the file holds, from the beginning.
        checkpoint_seconds: Time between checkpoints.
        watcher: Told what happens.
        team: The processes that each run is trained by, all of which call this; the first one alone reads and writes
            files, and returns what they hold.

    Raises:
        UsageError: The recipe names something that does not exist.
        StoreError: The file is in use, broken or cannot be written.
    """
    with ExitStack() as stack:
        planned = team.agreed(lambda: plan(recipe, team))  # first: a recipe that is refused leaves no file behind
        store = team.agreed(lambda: stack.enter_context(_opened(recipe, output)) if team.leads else None)
        todo = team.told([force or (store is not None and store.done(run.case.key()) is None) for run in planned])
        path = team.told(Path() if store is None else store.path)
        training = _Training(recipe.name, command, store, path, checkpoint_seconds, watcher or Unwatched(), team)
        training.watcher.planned(sum(todo), len(planned) - sum(todo))
        for entry in itertools.compress(planned, todo):
            training.run(entry, force)
        if store is None:
            return TrainingComparison((), sum(todo), None)
        found = tuple(run for entry in planned if (run := store.done(entry.case.key())) is not None)
        if output is not None:
            exports.export(texts(found, recipe.title, store.path))
        return TrainingComparison(found, sum(todo), store.path if output is not None else None, store.notice)


def texts(found: tuple[TrainingRun, ...], title: str, path: Path) -> dict[Path, str | bytes]:
    """Return what stands beside a file of runs."""
    table = accuracy_table(found, title)
    return {path.with_suffix(".md"): render.markdown(table), path.with_suffix(".csv"): render.csv_text(table)}


@dataclass(frozen=True)
class _Training:
    recipe: str
    command: str
    store: RunStore | None
    path: Path
    checkpoint_seconds: float
    watcher: Watcher
    team: Team

    def run(self, entry: PlannedRun, force: bool) -> None:
        """Train one run, and in the first process store what came of it."""
        folder = CheckpointFolder(self.path.with_suffix(".checkpoints") / entry.case.key())
        if self.store is not None and force:
            folder.remove()
        outcome = self._outcome(entry.case, folder)
        if self.store is None:
            return
        run = TrainingRun(
            recipe=self.recipe,
            case=entry.case,
            outcome=outcome,
            machine=machine(),
            versions=versions(),
            command=self.command,
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
            label=entry.label,
            published=entry.published,
        )
        self.store.append(run)
        folder.remove()
        self.watcher.finished(run)

    def _outcome(self, case: TrainingCase, folder: CheckpointFolder) -> Trained | Failure:
        try:
            loop = self.team.agreed(lambda: _made(case, self.team))
        except LostError:
            raise
        except Exception as error:
            return bench.failure_of(error)
        failure: Exception | None = None
        try:
            loop.resume(folder)
            with boundary("the run fails"):
                self._train(loop, folder)
                result = loop.result()
        except (StoreError, StoppedError, LostError):
            raise  # no fault of the run: the disk is full, a checkpoint is broken, or another process is gone
        except Exception as error:
            failure = error
        failure = self.team.ending(failure)
        return result if failure is None else bench.failure_of(failure)

    def _train(self, loop: TrainingLoop, folder: CheckpointFolder) -> None:
        self.watcher.started(loop.case, loop.steps, loop.done)
        saved = time.monotonic()
        for loss in loop:
            self.watcher.stepped(loop.done, loss)
            due = time.monotonic() - saved >= self.checkpoint_seconds and not loop.finished
            if self.team.told(due):
                loop.save(folder)
                saved = time.monotonic()


def _made(case: TrainingCase, team: Team) -> TrainingLoop:
    with boundary(f"model {case.model!r} cannot be built with {case.scheme}"):
        return TrainingLoop(case, team)


def _canonical(case: TrainingCase, together: dict[str, Any]) -> TrainingCase:
    return case.model_copy(update={"scheme": schemes.build(case.scheme).spec, **together})


@contextmanager
def _opened(recipe: runs.TrainingRecipe, output: Path | None) -> Iterator[RunStore]:
    here = machine()
    if output is None:
        with (
            TemporaryDirectory(prefix="actbench-") as folder,
            RunStore.opened(Path(folder) / "kept.runs.jsonl", here) as store,
        ):
            yield store
        return
    if output.suffix and output.suffix != ".jsonl":
        raise UsageError(f"--output {output}: name a folder or a .jsonl file")
    path = runs_path(output, recipe.name, here.name)
    for beside in texts((), recipe.title, path):
        exports.check(beside)
    with RunStore.opened(path, here) as store:
        yield store
