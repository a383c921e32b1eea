"""A whole comparison of training runs as one call: check the recipe, train what is not done yet, write the tables."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from actbench import scheme as schemes
from actbench.errors import StoreError, boundary
from actbench.machine import provenance
from actbench.measuring import bench
from actbench.measuring.meters import cudameter
from actbench.model.contents import Contents
from actbench.model.records import Failure
from actbench.run.experiment import ExperimentResult, Summary, check_distinct, finished, keep, pending
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned
from actbench.tools.train import recipe as runs
from actbench.tools.train.checkpoint import CheckpointFolder
from actbench.tools.train.loop import TrainingLoop
from actbench.tools.train.processes import SINGLE_PROCESS, LostError, ProcessGroup, StoppedError
from actbench.tools.train.records import Trained, TrainingCase, TrainingRun
from actbench.tools.train.tables import TRAINED

CHECKPOINT_SECONDS = 30.0
LOG = logging.getLogger(__name__)
"""Tells, for ``--debug``, the tracebacks of runs that failed."""


def plan(recipe: runs.TrainingRecipe, group: ProcessGroup = SINGLE_PROCESS) -> tuple[Planned[TrainingCase], ...]:
    """Return the runs of a recipe, every name checked and the schemes in canonical form.

    Raises:
        UsageError: A model, data set or scheme does not exist, or they do not go together.
        MeasurementError: The device is not there.
    """
    together = {"processes": group.size, "strategy": group.launch.strategy}
    written = recipe.runs(group.device)
    if any(run.case.device == "cuda" for run in written):
        cudameter.check_cuda("--device", "cpu")
    planned = tuple(
        replace(run, case=run.case.model_copy(update={"scheme": schemes.build(run.case.scheme).spec, **together}))
        for run in written
    )
    check_distinct(recipe.name, written, planned)
    checked = {"scheme": "exact", "seed": 0}
    for case in dict.fromkeys(run.case.model_copy(update=checked) for run in planned):
        with boundary(f"model {case.model!r} cannot be trained"):
            TrainingLoop(case, group).check()
    return planned


def run(
    recipe: runs.TrainingRecipe,
    output: Path | None,
    *,
    command: str,
    force: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: Progress | None = None,
    group: ProcessGroup = SINGLE_PROCESS,
) -> ExperimentResult[TrainingRun]:
    """Train the runs of a recipe that the file does not hold yet, one after the other in this process.

    A run that was stopped goes on from its last checkpoint, and its curve is bit for bit that of one that was not. A
    run that fails becomes a record with the reason, and the others go on.

    Args:
        recipe: What to compare.
        output: A folder, in which ``RECIPE/MACHINE.runs.jsonl`` is written with its table beside it; a ``.jsonl`` file;
            or None to keep nothing.
        command: What a user types to have the same, for the records.
        force: Train again what the file holds, from the beginning.
        checkpoint_seconds: Time between checkpoints.
        progress: Told what happens.
        group: The processes that train each run, all of which call this; the first alone reads and writes files, and
            returns what they hold.

    Raises:
        UsageError: The recipe names something that does not exist.
        StoreError: The file is in use, broken or cannot be written.
    """
    progress = progress or Progress()
    with ExitStack() as stack:
        planned = group.all_succeed(lambda: plan(recipe, group))  # first: a refused recipe leaves no file behind
        opened = TRAINED.opened(recipe.name, output)
        store = group.all_succeed(lambda: stack.enter_context(opened) if group.is_first else None)
        todo = group.broadcast([] if store is None else pending(planned, store, progress, force=force))
        path = group.broadcast(Path() if store is None else store.path)
        checkpoints = path.with_suffix(".checkpoints")
        outcomes = Training(checkpoints, force, checkpoint_seconds, progress, group).outcomes(todo)
        if store is None:
            deque(outcomes, maxlen=0)  # the first process stores what all of them train
            return ExperimentResult((), Summary(), None)
        origin = provenance(command)
        summary = keep(outcomes, TrainingRun, planned, store, progress, recipe=recipe.name, origin=lambda case: origin)
        return finished(TRAINED, store, planned, summary, recipe.title, output)


@dataclass(frozen=True)
class Training:
    """Trains runs in this process, and the others of its group.

    Attributes:
        checkpoints: Folder of the checkpoints, in one of its own for each run.
        force: Whether runs begin anew where there is a checkpoint.
    """

    checkpoints: Path
    force: bool
    checkpoint_seconds: float
    progress: Progress
    group: ProcessGroup = SINGLE_PROCESS

    def outcomes(self, cases: Sequence[TrainingCase]) -> Iterator[tuple[TrainingCase, Trained | Failure]]:
        """Train one case after the other; the checkpoints of one are removed before the next."""
        for case in cases:
            files = Contents().of(case) or {}  # where one holds something else now, the run begins anew
            folder = CheckpointFolder(self.checkpoints / "-".join([case.key(), *files.values()]))
            if self.group.is_first and self.force:
                folder.remove()
            yield case, self._outcome(case, folder)
            if self.group.is_first:
                folder.remove()

    def _outcome(self, case: TrainingCase, folder: CheckpointFolder) -> Trained | Failure:
        try:
            loop = self.group.all_succeed(lambda: _made(case, self.group))
        except LostError:
            raise
        except Exception as error:
            LOG.debug("%s:", case.name, exc_info=error)
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
        if failure is not None:
            LOG.debug("%s:", case.name, exc_info=failure)
        failure = self.group.end_run(failure)
        return result if failure is None else bench.failure_of(failure)

    def _train(self, loop: TrainingLoop, folder: CheckpointFolder) -> None:
        self.progress.started(loop.case, loop.steps, loop.done)
        saved = time.monotonic()
        for loss in loop:
            self.progress.stepped(loop.done, loss)
            due = time.monotonic() - saved >= self.checkpoint_seconds and not loop.finished
            if self.group.broadcast(due):
                loop.save(folder)
                saved = time.monotonic()


def _made(case: TrainingCase, group: ProcessGroup) -> TrainingLoop:
    with boundary(f"model {case.model!r} cannot be built with {case.scheme}"):
        return TrainingLoop(case, group)
