"""Training runs on a cluster: what is asked of nodes, for which Ray is a stand-in, and what a node does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actbench.errors import StoreError, UsageError
from actbench.experiments.cluster import node
from actbench.experiments.cluster.cluster import Cluster
from actbench.experiments.experiment import Summary
from actbench.experiments.recipes.runs import TrainingRecipe
from actbench.experiments.runner.progress import Progress
from actbench.results.linefile import locked
from actbench.results.records import Failure
from actbench.results.runs import Evaluation, Trained, TrainingCase
from actbench.results.sources import sources
from actbench.training import comparison, noderun
from actbench.training.checkpoint import FILE_NAME, CheckpointFolder
from actbench.training.loop import TrainingLoop
from actbench.training.noderun import RunReply, RunRequest
from actbench.training.oncluster import RunSettings, run

TRAINED = Trained(
    metric="accuracy",
    steps=2,
    losses=(1.0, 0.5),
    step_seconds=(0.1, 0.1),
    evaluations=(Evaluation(step=2, loss=0.5, accuracy=0.5),),
    weights_bytes=1,
    activation_bytes=2,
    peak_bytes=3,
)
CASE = TrainingCase(
    model="resnet-cifar@depth=8,width=4,channels=1",
    data="digits",
    image_size=8,
    batch_size=32,
    steps=4,
    optimizer="sgd",
    learning_rate=0.1,
    momentum=0.9,
)
Node = Callable[[RunRequest], Any]


@pytest.fixture
def recipe() -> Callable[..., TrainingRecipe]:
    """Return a maker of a recipe of two seeds and two schemes."""

    def make(device: str = "auto") -> TrainingRecipe:
        section = CASE.model_dump(exclude_defaults=True, exclude={"scheme", "seed"}) | {"seeds": [0, 1]}
        scheme = [{"spec": "exact"}, {"spec": "checkpoint,blocks=ResidualBlock"}]
        table = {"name": "which", "title": "Which?", "train": [{**section, "device": device}], "scheme": scheme}
        return TrainingRecipe.validated(table, "test")

    return make


@pytest.fixture
def on_nodes(fakeray: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a maker of a stand-in for a cluster; ``answer`` gives what comes of a run, or raises."""

    def make(answer: Node = lambda request: TRAINED, has_gpus: bool = False) -> Any:
        def replied(text: str, task: int) -> str:
            outcome = answer(RunRequest.model_validate_json(text))
            return RunReply(outcome=outcome, **fakeray.where()).model_dump_json()

        ray = fakeray.FakeRay(replied)
        ray.has = {"GPU": 1.0} if has_gpus else {}

        @contextmanager
        def connected(self: Cluster) -> Iterator[Any]:
            yield ray

        monkeypatch.setattr(Cluster, "connected", connected)
        return ray

    return make


def requests(ray: Any) -> list[RunRequest]:
    return [RunRequest.model_validate_json(text) for text, _, _ in ray.asked]


def trained(recipe: TrainingRecipe, output: Path, **settings: Any) -> Any:
    return run(Cluster("auto"), recipe, output, command="actbench train", settings=RunSettings(**settings))


def test_each_run_is_a_task_of_all_cores_of_a_node_and_comes_back_once(
    recipe: Any, on_nodes: Any, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    ray = on_nodes()
    first = trained(recipe(), tmp_path, timeout_seconds=60.0, checkpoints="/shared", checkpoint_seconds=5.0)
    again = trained(recipe(), tmp_path)

    assert (first.summary, again.summary) == (Summary(measured=4), Summary(skipped=4))
    assert [record.outcome for record in first.records] == [TRAINED] * 4
    assert len(ray.asked) == 4
    assert ray.function is noderun.train
    assert {options["num_cpus"] for _, _, options in ray.asked} == {4, 8}
    asked = requests(ray)
    assert [(each.case.scheme, each.case.seed) for each in asked] == [
        (spec, seed) for seed in (0, 1) for spec in ("exact", "checkpoint,blocks=ResidualBlock")
    ]
    assert {(each.timeout_seconds, each.checkpoints, each.checkpoint_seconds, each.anew) for each in asked} == {
        (60.0, "/shared", 5.0, None)
    }
    assert {record.command for record in first.records} == {"actbench train"}


@pytest.mark.parametrize(
    ("device", "has_gpus", "expected"), [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu")]
)
def test_the_device_is_that_of_the_nodes(
    recipe: Any, on_nodes: Any, tmp_path: Path, device: str, has_gpus: bool, expected: str
) -> None:
    ray = on_nodes(has_gpus=has_gpus)
    trained(recipe(device), tmp_path, cores=2)

    assert {each.case.device for each in requests(ray)} == {expected}
    (options,) = {tuple(sorted((name, str(value)) for name, value in each[2].items())) for each in ray.asked}
    cuda = (("num_cpus", "1.0"), ("num_gpus", "1.0"), ("resources", "{}"))
    assert options == (cuda if expected == "cuda" else (("num_cpus", "2.0"), ("resources", "{}")))


def test_a_gpu_that_no_node_has_is_refused(recipe: Any, on_nodes: Any, tmp_path: Path) -> None:
    on_nodes()

    with pytest.raises(UsageError, match="no node has CPU=1, GPU=1, as a run on device cuda asks for"):
        trained(recipe("cuda"), tmp_path)


def test_experiments_share_no_checkpoints_and_force_begins_anew(recipe: Any, on_nodes: Any, tmp_path: Path) -> None:
    ray = on_nodes()
    for output, force in (("one", False), ("one", True), ("other", False), ("one", True)):
        trained(recipe(), tmp_path / output, cores=1, force=force)
    one, forced, other = ({each.experiment for each in requests(ray)[at : at + 4]} for at in (0, 4, 8))

    assert one == forced
    assert len(one | other) == 2
    plain, named, another, later = ({each.anew for each in requests(ray)[at : at + 4]} for at in (0, 4, 8, 12))
    assert plain == another == {None}
    assert len(named) == len(later) == 1
    assert len(named | later | {None}) == 3


def test_a_forced_run_is_tried_again_by_the_same_name(recipe: Any, on_nodes: Any, fakeray: Any, tmp_path: Path) -> None:
    asked: list[RunRequest] = []

    def lost_once(request: RunRequest) -> Trained:
        asked.append(request)
        if len(asked) == 1:
            raise fakeray.RayError("The node died.")
        return TRAINED

    on_nodes(lost_once)
    trained(recipe(), tmp_path, cores=1, force=True)

    assert asked.count(asked[0]) == 2
    assert len(asked) == 5


def test_a_run_that_is_lost_twice_is_tried_again_by_the_same_command(
    recipe: Any, on_nodes: Any, fakeray: Any, tmp_path: Path
) -> None:
    def lost(request: RunRequest) -> Trained:
        if request.case.seed:
            raise fakeray.RayError("The node died.")
        return TRAINED

    on_nodes(lost)
    first = trained(recipe(), tmp_path, cores=1)
    on_nodes()
    again = trained(recipe(), tmp_path, cores=1)

    assert (first.summary, again.summary) == (Summary(2, 2), Summary(measured=2, skipped=2))
    assert "was lost, twice: The node died." in first.records[2].outcome.message
    assert all(isinstance(record.outcome, Trained) for record in again.records)


@pytest.mark.parametrize(
    ("flags", "naming"),
    [
        (["--cores-per-run", "2"], "--cores-per-run: only with --cluster"),
        (["--timeout", "60", "--checkpoints", "/x"], "--checkpoints and --timeout: only with --cluster"),
        (["--cluster", "auto", "--checkpoints", "shared"], "--checkpoints shared: give the path from the root"),
        (["--cluster", "auto", "--gpus-per-case", "1.5"], "--gpus-per-case 1.5"),
    ],
)
def test_flags_that_say_nothing_are_refused(cli: Any, flags: list[str], naming: str) -> None:
    cli.refused("train", "digits", *flags, naming=naming)


def test_several_processes_and_a_cluster_do_not_go_together(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)

    cli.refused("train", "digits", "--cluster", "auto", naming="2 were launched: start actbench train by itself")


def test_a_worker_of_ray_s_imports_no_torch() -> None:
    """The process of the run does: it would stand in memory twice, once for each core."""
    code = "import sys, actbench.training.noderun; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def here(folder: Path, *, anew: str | None = None) -> Trained | Failure:
    """Train the case in this process, as that of a node does."""
    request = RunRequest(
        case=CASE, experiment="test", checkpoints=None, anew=anew, checkpoint_seconds=60.0, timeout_seconds=None
    )
    text = noderun.PlacedRun(**dict(request), folder=str(folder)).model_dump_json()
    return noderun._OUTCOMES.validate_json(comparison.train_here(text))


def stopped(folder: Path, after: int) -> None:
    """Leave what a process leaves that is ended after some steps."""
    loop = TrainingLoop(CASE)
    for _ in zip(range(after), loop, strict=False):
        pass
    loop.save(CheckpointFolder(folder / CASE.key()))


def test_a_run_goes_on_where_its_checkpoint_is_and_else_begins_anew(tmp_path: Path) -> None:
    stopped(tmp_path / "with", 2)
    found, alone = here(tmp_path / "with"), here(tmp_path / "without")

    assert isinstance(found, Trained)
    assert isinstance(alone, Trained)
    assert (found.resumed_at, alone.resumed_at) == ((2,), ())
    assert found.losses == alone.losses
    assert found.evaluations == alone.evaluations
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.lock"))


def test_a_forced_run_begins_anew_but_not_at_its_second_try(tmp_path: Path) -> None:
    stopped(tmp_path / "with", 3)
    CheckpointFolder(tmp_path / "with" / CASE.key()).begin("one")
    assert not list(tmp_path.rglob("*.safetensors"))
    stopped(tmp_path / "with", 2)  # its node is lost
    again = here(tmp_path / "with", anew="one")
    stopped(tmp_path / "with", 3)
    CheckpointFolder(tmp_path / "with" / CASE.key()).begin("one")
    stopped(tmp_path / "with", 2)
    other = here(tmp_path / "with", anew="two")

    assert isinstance(again, Trained)
    assert isinstance(other, Trained)
    assert (again.resumed_at, other.resumed_at) == ((2,), ())
    assert again.losses == other.losses
    assert not list(tmp_path.rglob("*"))


def test_two_processes_never_write_one_checkpoint(tmp_path: Path) -> None:
    """A node that was taken for lost may still be at it."""
    with locked(tmp_path / f"with-{CASE.key()}"):
        found = here(tmp_path / "with")

    assert isinstance(found, Failure)
    assert found.reason == "unavailable"  # which the same command tries again
    assert "another actbench process" in found.message


def test_a_broken_checkpoint_is_an_error_and_no_new_run(tmp_path: Path) -> None:
    stopped(tmp_path / "with", 2)
    (tmp_path / "with" / CASE.key() / FILE_NAME).write_text("{")

    with pytest.raises(StoreError, match="remove the folder"):
        here(tmp_path / "with")


@pytest.fixture
def as_node(monkeypatch: pytest.MonkeyPatch, fakeray: Any, tmp_path: Path) -> Callable[..., Trained | Failure]:
    """Return what trains a case as a task does."""
    monkeypatch.setattr(node, "here", lambda: node.Reply(**fakeray.where()))
    monkeypatch.chdir(tmp_path)  # which the task leaves
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def train(case: TrainingCase, shared: str | None = None, **settings: Any) -> Trained | Failure:
        given = {"checkpoints": shared, "checkpoint_seconds": 0.0, "timeout_seconds": None, **settings}
        request = RunRequest(case=case, experiment="test", **given)
        same = node.Shared(files={}, sources=sources()).model_dump_json()
        outcome: Trained | Failure = RunReply.model_validate_json(
            noderun.train(request.model_dump_json(), same)
        ).outcome
        return outcome

    return train


@pytest.mark.slow
def test_a_run_in_a_process_of_its_own_and_what_becomes_of_its_end(as_node: Any, tmp_path: Path) -> None:
    direct = here(tmp_path / "direct")
    found = as_node(CASE)
    late = as_node(CASE.model_copy(update={"steps": 100_000}), str(tmp_path / "shared"), timeout_seconds=20.0)

    assert isinstance(direct, Trained)
    assert isinstance(found, Trained)
    assert found.losses == pytest.approx(direct.losses)
    assert isinstance(late, Failure)
    assert late.reason == "timeout"
    assert "the run worked for longer than --timeout 20 s" in late.message
    assert len(list((tmp_path / "shared").rglob("*.safetensors"))) >= 1  # it lies in the folder that nodes share


def test_a_run_begins_anew_after_a_change_of_the_file_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, folders = CASE.model_copy(update={"model": f"{tmp_path}/own.py:build"}), []
    monkeypatch.setattr(comparison.Training, "_outcome", lambda self, case, folder: folders.append(folder.path))
    for text in ("first", "first", "second"):
        (tmp_path / "own.py").write_text(text)
        list(comparison.Training(tmp_path, False, 0.0, Progress()).outcomes([case]))

    assert folders[0] == folders[1] != folders[2]
