"""Training runs on the nodes of a Ray cluster."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actbench.experiments.cluster.cluster import Cluster, Needs, Nodes
from actbench.experiments.cluster.node import Origins, shared_of
from actbench.experiments.cluster.tasks import LostTask, RayTasks
from actbench.experiments.experiment import ExperimentResult, finished, keep, pending
from actbench.experiments.recipes.runs import TrainingRecipe
from actbench.experiments.runner.progress import Progress
from actbench.paths import file_name
from actbench.results.records import Failure
from actbench.results.runs import DeviceName, Trained, TrainingCase, TrainingRun
from actbench.results.tables.training import TRAINED
from actbench.training import noderun
from actbench.training.comparison import CHECKPOINT_SECONDS, plan


@dataclass(frozen=True)
class RunSettings:
    """How runs are trained on nodes.

    Attributes:
        cores: Of a run on the CPU; None for all of a node.
        checkpoints: Folder that all nodes share; None for each node's own.
        checkpoint_seconds: Time between checkpoints.
        timeout_seconds: After which a run is stopped; None is without end.
        force: Train again what the file holds, from the beginning.
    """

    cores: int | None = None
    checkpoints: str | None = None
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    timeout_seconds: float | None = None
    force: bool = False


def run(
    cluster: Cluster,
    recipe: TrainingRecipe,
    output: Path | None,
    *,
    command: str,
    settings: RunSettings = RunSettings(),
    progress: Progress | None = None,
) -> ExperimentResult[TrainingRun]:
    """Train the runs of a recipe that the file does not hold yet, each on a node of a cluster.

    A run is a task of a GPU, or of all cores of a node. One whose worker or node is lost, or which ends its process, is
    tried once more, as :meth:`~actbench.experiments.cluster.tasks.RayTasks.replies` says. It goes on from its last
    checkpoint where the node finds that, and begins anew where not. What any machine trained is not trained again.

    ``output`` and ``command`` are as of :func:`actbench.training.comparison.run`.

    Raises:
        UsageError: The recipe names something that does not exist, the cluster cannot be reached, or no node has what
            a run asks for.
        MeasurementError: A node has another actbench, or none.
        StoreError: The file, or a checkpoint, is in use, broken or cannot be written.
    """
    progress = progress or Progress()
    with cluster.connected() as ray:
        planned = plan(recipe, elsewhere=_device(ray))
        with TRAINED.opened(recipe.name, output, of_any_machine=True) as store:
            todo = pending(planned, store, progress, force=settings.force)
            digest = hashlib.sha256(str(store.path.resolve()).encode()).hexdigest()
            experiment = f"{file_name(recipe.name)}-{digest[:16]}"
            work = RunWork(experiment, settings, progress, anew=secrets.token_hex(8) if settings.force else None)
            origins: Origins[TrainingCase] = Origins(command)
            with closing(_outcomes(ray, cluster, work, origins, todo)) as outcomes:
                summary = keep(outcomes, TrainingRun, planned, store, progress, recipe=recipe.name, origin=origins.pop)
            return finished(TRAINED, store, planned, summary, recipe.title, output)


def _device(ray: Any) -> DeviceName:
    """Return what the device ``auto`` stands for: a GPU where a node has one."""
    return "cuda" if any(node.resources.get("GPU") for node in Nodes(ray).alive) else "cpu"


@dataclass(frozen=True)
class RunWork:
    """Training a run on a node; ``experiment`` and ``anew`` are as of :class:`~.noderun.RunRequest`."""

    experiment: str
    settings: RunSettings
    progress: Progress
    anew: str | None = None
    function: Callable[[str, str], str] = field(default=noderun.train)

    def request(self, item: TrainingCase) -> str:
        """Return a :class:`~actbench.training.noderun.RunRequest` in JSON."""
        request = noderun.RunRequest(
            case=item,
            experiment=self.experiment,
            checkpoints=self.settings.checkpoints,
            anew=self.anew,
            checkpoint_seconds=self.settings.checkpoint_seconds,
            timeout_seconds=self.settings.timeout_seconds,
        )
        return request.model_dump_json()

    def reply(self, text: str) -> noderun.RunReply:
        """Read what a node returned."""
        return noderun.RunReply.model_validate_json(text)

    def crashed(self, reply: noderun.RunReply) -> bool:
        """Whether the run ended its process."""
        return isinstance(reply.outcome, Failure) and reply.outcome.reason == "crash"

    def started(self, item: TrainingCase) -> None:
        """Tell the progress."""
        self.progress.started(item)


def _outcomes(
    ray: Any, cluster: Cluster, work: RunWork, origins: Origins[TrainingCase], cases: Sequence[TrainingCase]
) -> Generator[tuple[TrainingCase, Trained | Failure], None, None]:
    """Yield each run with what came of it as soon as its task ends, those on a GPU before the others."""
    tasks = RayTasks(ray, work, shared_of(cases))
    for device in ("cuda", "cpu"):
        chosen = [case for case in cases if case.device == device]
        if chosen:
            with closing(tasks.replies(chosen, _needs(device, cluster, work.settings.cores))) as replies:
                for case, reply in replies:
                    if isinstance(reply, LostTask):
                        origins.note([case], None)
                        why = f"the worker or node of the run was lost, twice: {reply.why}"
                        yield case, Failure(reason="unavailable", message=why)
                    else:
                        origins.note([case], reply)
                        yield case, reply.outcome


def _needs(device: str, cluster: Cluster, cores: int | None) -> Needs:
    cores = cores if device == "cpu" else None
    gpus = {"GPU": cluster.gpus} if device == "cuda" else {}
    return Needs(
        f"a run on device {device}",
        {"CPU": float(cores or 1), **gpus, **cluster.resources},
        whole_node=device == "cpu" and cores is None,
    )
