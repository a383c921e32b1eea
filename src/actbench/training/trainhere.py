"""What the process of a run does on a node of a cluster."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from actbench.errors import StoreError
from actbench.experiments.runner.progress import Progress
from actbench.results.linefile import locked
from actbench.results.records import Failure
from actbench.training.checkpoint import CheckpointFolder
from actbench.training.comparison import Training
from actbench.training.noderun import PlacedRun


def train_here(text: str) -> str:
    """Train a :class:`~actbench.training.noderun.PlacedRun` in this process and return what came of it, both in JSON.

    The run goes on from its last checkpoint, if there is one, and it is not to begin anew.

    Raises:
        StoreError: The checkpoint is broken, or cannot be written.
    """
    asked = PlacedRun.model_validate_json(text)
    with ExitStack() as held:
        try:
            held.enter_context(locked(Path(f"{asked.folder}-{asked.case.key()}")))
        except StoreError as error:  # a task that was taken for lost goes on with it, or the folder cannot be written
            return Failure(reason="unavailable", message=f"its checkpoints: {error}").model_dump_json()
        if asked.anew is not None:
            CheckpointFolder(Path(asked.folder) / asked.case.key()).begin(asked.anew)
        training = Training(Path(asked.folder), False, asked.checkpoint_seconds, Progress())
        ((_, outcome),) = training.outcomes([asked.case])
    return outcome.model_dump_json()
