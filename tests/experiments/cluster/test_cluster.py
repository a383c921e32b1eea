"""Cases on a cluster: what is asked of Ray, and what becomes of tasks that are lost. Ray is a stand-in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from actbench.errors import MeasurementError, UsageError
from actbench.experiments.cluster import node
from actbench.experiments.cluster.cluster import Cluster, ClusterSweep
from actbench.experiments.runner.progress import Progress
from actbench.results.machine import provenance
from actbench.results.measured import Measurement, Outcome
from actbench.results.records import Case, Failure

MEASURED = Measurement(weights_bytes=1, activation_bytes=2, peak_bytes=3)
HAS = {"GPU": 1.0, "a100": 1.0, "memory": 64e9, "node:10.0.0.1": 1.0}
IDS = {"first": "a" * 56, "second": "b" * 56}
CRASHED = Failure(reason="crash", message="it died")
Answer = Callable[[node.Request, int], str]


class RayError(Exception):
    """As of Ray: a worker or node was lost."""


class RayTaskError(RayError):
    """As of Ray: the task raised something."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def replying(outcome: Outcome, host: str = "first") -> str:
    """Return the reply of a node to a request of one case."""
    origin = provenance("")
    return node.Reply(
        outcomes=((CASES[0], outcome),), machine=origin["machine"], versions=origin["versions"], host=host
    ).model_dump_json()


CASES = [Case(model="tiny-bert", scheme=scheme, batch_size=1) for scheme in ("exact", "checkpoint", "gact:L2")]


class FakeRay:
    """Runs tasks as they are asked for, and remembers with which options."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[tuple[node.Request, dict[str, Any]]] = []
        self.cancelled: list[Any] = []
        self.most_flying = 0

    def remote(self, function: object) -> Any:
        assert function is node.measure
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda text: self._run(text, options)))

    def _run(self, text: str, options: dict[str, Any]) -> int:
        assert options.pop("max_retries") == 0  # retries are counted here, so that they go elsewhere
        self.asked.append((node.Request.model_validate_json(text), options))
        return len(self.asked) - 1

    def wait(self, tasks: list[int], num_returns: int) -> tuple[list[int], list[int]]:
        self.most_flying = max(self.most_flying, len(tasks))
        return tasks[:num_returns], tasks[num_returns:]

    def get(self, task: int) -> str:
        return self._answer(self.asked[task][0], task)

    def cancel(self, task: int, force: bool) -> None:
        self.cancelled.append(task)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        cores = {"first": 4.0, "second": 8.0}
        return [
            {"Alive": True, "NodeManagerHostname": name, "NodeID": IDS[name], "Resources": {**HAS, "CPU": cores[name]}}
            for name in IDS
        ]


def sweep(answer: Answer, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[ClusterSweep, FakeRay]:
    """Return a sweep on a cluster whose nodes answer so."""
    ray = FakeRay(answer)

    @contextmanager
    def connected(self: Cluster) -> Iterator[FakeRay]:
        yield ray

    monkeypatch.setattr(Cluster, "connected", connected)
    return ClusterSweep(Cluster("auto", **settings), "actbench sweep", 60.0, Progress()), ray


def each(outcome: Outcome) -> Answer:
    """Return a node's answer that gives every case one outcome."""
    origin = provenance("actbench sweep")

    def answer(request: node.Request, task: int) -> str:
        found = tuple((case, outcome) for case in request.cases)
        made = node.Reply(outcomes=found, machine=origin["machine"], versions=origin["versions"], host="first")
        return made.model_dump_json()

    return answer


def test_simulated_cases_are_tasks_of_one_core_and_all_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ray = sweep(each(MEASURED), monkeypatch, resources={"a100": 0.5})

    assert dict(made.outcomes(CASES)) == dict.fromkeys(CASES, MEASURED)
    assert [request.cases for request, _ in ray.asked] == [(case,) for case in CASES]
    for request, options in ray.asked:
        assert options == {"num_cpus": 1, "resources": {"a100": 0.5}}
        assert (request.timeout_seconds, request.sources) == (60.0, node.sources())
    assert set(made.origins) == set(CASES)
    assert made.origins[CASES[0]]["command"] == "actbench sweep"


def test_the_driver_holds_few_tasks_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ray = sweep(each(MEASURED), monkeypatch)
    many = [CASES[0].model_copy(update={"batch_size": size}) for size in range(1, 1001)]

    assert len(list(made.outcomes(many))) == 1000
    assert ray.most_flying == 2


def test_cases_that_are_timed_together_are_one_task_with_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    made, ray = sweep(each(MEASURED), monkeypatch, gpus=0.5)
    on_gpu = [case.model_copy(update={"meter": "cuda"}) for case in CASES]
    on_cpu = [case.model_copy(update={"meter": "cpu"}) for case in CASES]

    assert dict(made.outcomes([*on_gpu, *on_cpu, *CASES])) == dict.fromkeys([*on_gpu, *on_cpu, *CASES], MEASURED)
    assert [request.cases[0].meter for request, _ in ray.asked] == [*["simulated"] * 3, "cuda", "cpu"]
    needs = {frozenset(request.cases): options for request, options in ray.asked}
    assert needs[frozenset(on_gpu)]["num_gpus"] == 0.5
    assert needs[frozenset(on_cpu)]["num_cpus"] == 8  # all of that node
    assert needs[frozenset(on_cpu)]["scheduling_strategy"].node_id == IDS["second"]


@pytest.mark.parametrize(("second", "expected"), [(MEASURED, MEASURED), (CRASHED, CRASHED)])
def test_a_case_that_ends_its_process_is_tried_once_more_elsewhere(
    second: Outcome, expected: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    answers = [replying(CRASHED), replying(second, "second")]
    made, ray = sweep(lambda request, task: answers[task], monkeypatch)

    assert list(made.outcomes(CASES[:1])) == [(CASES[0], expected)]
    assert len(ray.asked) == 2
    assert "scheduling_strategy" not in ray.asked[0][1]
    assert ray.asked[1][1]["scheduling_strategy"].node_id == IDS["second"]


def test_what_has_a_record_is_timed_again_beside_what_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ray = sweep(each(MEASURED), monkeypatch)
    made._done = lambda case: case.scheme == "exact"

    list(made.outcomes([case.model_copy(update={"meter": "cuda"}) for case in CASES[1:]]))
    list(made.outcomes([case.model_copy(update={"meter": "cuda"}) for case in CASES]))

    assert [request.known_exact for request, _ in ray.asked] == [True, False]


@pytest.mark.parametrize(
    ("settings", "meter", "naming"),
    [
        (
            {"gpus": 2.0},
            "cuda",
            "no node has CPU=1, GPU=2, as a case of --meter cuda asks for; nodes: first CPU=4, GPU=1",
        ),
        ({"resources": {"a10": 1.0}}, "simulated", "no node has CPU=1, a10=1"),
    ],
)
def test_what_no_node_has_is_refused(
    settings: dict[str, Any], meter: str, naming: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = sweep(each(MEASURED), monkeypatch, **settings)

    with pytest.raises(UsageError, match=f"--cluster: {naming}"):
        list(made.outcomes([CASES[0].model_copy(update={"meter": meter})]))


def test_memory_is_an_option_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ray = sweep(each(MEASURED), monkeypatch, resources={"memory": 8e9})

    list(made.outcomes(CASES[:1]))

    assert ray.asked[0][1] == {"num_cpus": 1, "memory": 8e9, "resources": {}}


def test_a_node_that_is_lost_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(request: node.Request, task: int) -> str:
        raise RayError("The node died.\nmore")

    made, ray = sweep(lost, monkeypatch)
    [(case, outcome)] = made.outcomes(CASES[:1])

    assert isinstance(outcome, Failure)
    assert outcome.reason == "crash"
    assert outcome.message == "the worker or node of the case was lost, twice: The node died."
    assert len(ray.asked) == 2
    assert made.origins[case]["machine"] == provenance("")["machine"]


@pytest.mark.parametrize(
    ("cause", "naming"),
    [
        (MeasurementError("the node x has another actbench"), "--cluster: the node x has another actbench"),
        (ModuleNotFoundError("No module named 'actbench'"), "a node has no actbench that can be imported"),
        (OSError("no space"), "a node failed: OSError: no space"),
    ],
)
def test_what_is_wrong_with_nodes_ends_the_sweep(
    cause: Exception, naming: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: node.Request, task: int) -> str:
        raise RayTaskError(cause)

    made, ray = sweep(broken, monkeypatch)

    with pytest.raises(MeasurementError, match=naming):
        list(made.outcomes(CASES))
    assert ray.cancelled == [1]


def test_a_node_with_another_actbench_refuses() -> None:
    request = node.Request(cases=(), timeout_seconds=None, files={}, sources="other", command="")

    with pytest.raises(MeasurementError, match=r"another actbench .* install the same on all nodes"):
        node.measure(request.model_dump_json())


@pytest.mark.parametrize(
    ("flags", "naming"),
    [
        (["--gpus-per-case", "1"], "are for --cluster"),
        (["--cluster", "auto", "--resources", "a100"], "--resources 'a100': give a name and an amount of at least"),
        (["--cluster", "auto", "--resources", "GPU=2"], "--gpus-per-case says how many"),
        (["--cluster", "auto", "--gpus-per-case", "1.5"], "--gpus-per-case 1.5: give a part of one GPU"),
        (["--cluster", "auto", "--gpus-per-case", "0"], "--gpus-per-case 0: give"),
        (["--cluster", "auto", "--resources", "a100=-1"], "--resources 'a100=-1'"),
    ],
)
def test_flags_that_say_nothing_are_refused(cli: Any, flags: list[str], naming: str) -> None:
    cli.refused("sweep", "tiny-bert", "-s", "exact", "-m", "simulated", *flags, naming=naming)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)

    with pytest.raises(UsageError, match=r"pip install 'actbench\[cluster\]'"), Cluster("auto").connected():
        pass
