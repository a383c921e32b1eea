"""What a node of a cluster does: it trains one run, in a process of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from actbench import errors
from actbench.caches import user_cache
from actbench.errors import MeasurementError
from actbench.experiments.cluster import node
from actbench.experiments.runner.isolated import IsolatedProcess
from actbench.experiments.runner.worker import Answer, TaskRequest
from actbench.results.records import Data, Failure
from actbench.results.runs import Trained, TrainingCase

_MODULE = "actbench.training.comparison"  # which imports torch: a worker of Ray's does without
_OUTCOMES: TypeAdapter[Trained | Failure] = TypeAdapter(Annotated[Trained | Failure, Field(discriminator="kind")])


class RunRequest(Data):
    """A run to train.

    Attributes:
        experiment: Names the results file that the run is for: experiments share no checkpoints.
        checkpoints: Folder that all nodes share; None for each node's own.
        anew: Names the command that begins it anew: a checkpoint of another is removed, and its own is not, for a
            second try. None goes on from any.
        checkpoint_seconds: Time between checkpoints.
        timeout_seconds: After which it is stopped; None is without end.
    """

    case: TrainingCase
    experiment: str
    checkpoints: str | None
    anew: str | None = None
    checkpoint_seconds: float
    timeout_seconds: float | None


class RunReply(node.Reply):
    """What came of a run."""

    outcome: Annotated[Trained | Failure, Field(discriminator="kind")]


def train(text: str, shared: str) -> str:
    """Train the run of a :class:`RunRequest` and return a :class:`RunReply`, all in JSON.

    Raises:
        MeasurementError: This node has another actbench, or its processes cannot be started.
        StoreError: The checkpoint is broken, or cannot be written.
    """
    node.prepare(shared)
    request = RunRequest.model_validate_json(text)
    changes = hashlib.sha256(shared.encode()).hexdigest()[:16]
    folder = _root(request.checkpoints) / f"{request.experiment}-{changes}"
    asked = PlacedRun(**dict(request), folder=str(folder))
    with (
        node.serving(_MODULE, kind="task") as server,
        IsolatedProcess(server, request.timeout_seconds, what="run", again="give the same command") as process,
    ):
        task = TaskRequest(function="train_here", text=asked.model_dump_json(), is_limited=request.case.device == "cpu")
        outcome = process.ask(task.model_dump_json().encode(), _read, "it was trained")
    return RunReply(outcome=outcome, **dict(node.here())).model_dump_json()


class PlacedRun(RunRequest):
    """A run to train on this node; ``folder`` is where its checkpoints lie."""

    folder: str


def _root(shared: str | None) -> Path:
    return user_cache() / "checkpoints" if shared is None else Path(shared)


def _read(answer: bytes) -> Trained | Failure:
    """Return the outcome that the process of a run answered, or raise its error."""
    told = Answer.model_validate_json(answer)
    if told.raised is not None:
        raise getattr(errors, told.raised.kind or "", MeasurementError)(told.raised.message)
    return _OUTCOMES.validate_json(told.text or "")
