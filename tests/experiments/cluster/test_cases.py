"""Cases on a cluster: what is asked of nodes. Ray is a stand-in here."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from actbench.errors import MeasurementError, UsageError
from actbench.experiments.cluster import node
from actbench.experiments.cluster.cases import CaseWork, ClusterCases
from actbench.experiments.cluster.cluster import Cluster
from actbench.experiments.cluster.node import Origins
from actbench.experiments.runner.progress import Progress
from actbench.results.machine import provenance
from actbench.results.measured import Measurement, Outcome
from actbench.results.records import Case, Failure
from actbench.results.sources import sources

MEASURED = Measurement(weights_bytes=1, activation_bytes=2, peak_bytes=3)
CASES = [Case(model="tiny-bert", scheme=scheme, batch_size=1) for scheme in ("exact", "checkpoint", "gact:L2")]


@pytest.fixture
def each(fakeray: Any) -> Callable[[Outcome], Any]:
    """Return a maker of answers that give every case one outcome."""

    def make(outcome: Outcome) -> Any:
        where = fakeray.where()

        def answer(text: str, task: int) -> str:
            found = tuple((case, outcome) for case in node.Request.model_validate_json(text).cases)
            return node.CasesReply(outcomes=found, **where).model_dump_json()

        return answer

    return make


@pytest.fixture
def on_cluster(fakeray: Any, each: Any) -> Callable[..., tuple[ClusterCases, Any]]:
    """Return a maker of what measures on a stand-in for a cluster, whose nodes measure everything unless given."""

    def make(answer: Any = None, work: CaseWork | None = None, **settings: Any) -> tuple[ClusterCases, Any]:
        ray = fakeray.FakeRay(answer or each(MEASURED))
        work = work or CaseWork(Progress(), 60.0)
        return ClusterCases(ray, Cluster("auto", **settings), work, Origins("actbench sweep")), ray

    return make


def requests(ray: Any) -> list[node.Request]:
    return [node.Request.model_validate_json(text) for text, _, _ in ray.asked]


def test_simulated_cases_are_tasks_of_one_core_and_all_come_back(on_cluster: Any) -> None:
    made, ray = on_cluster(resources={"a100": 0.5})

    assert dict(made.outcomes(CASES)) == dict.fromkeys(CASES, MEASURED)
    assert [(request.cases, request.timeout_seconds) for request in requests(ray)] == [
        ((case,), 60.0) for case in CASES
    ]
    assert ray.function is node.measure
    for _, shared, options in ray.asked:
        assert options == {"num_cpus": 1, "resources": {"a100": 0.5}}
        assert json.loads(shared) == {"files": {}, "sources": sources()}
    origins = [made.origins.pop(case) for case in CASES]
    assert origins[0]["command"] == "actbench sweep"
    assert all(origin is origins[0] for origin in origins)  # of thousands of records too


def test_cases_that_are_timed_together_are_one_task_with_their_device(on_cluster: Any, fakeray: Any) -> None:
    pytest.importorskip("ray")
    made, ray = on_cluster(gpus=0.5)
    on_gpu = [case.model_copy(update={"meter": "cuda"}) for case in CASES]
    on_cpu = [case.model_copy(update={"meter": "cpu"}) for case in CASES]

    assert dict(made.outcomes([*on_gpu, *on_cpu, *CASES])) == dict.fromkeys([*on_gpu, *on_cpu, *CASES], MEASURED)
    assert [request.cases[0].meter for request in requests(ray)] == [*["simulated"] * 3, "cuda", "cpu"]
    needs = {frozenset(node.Request.model_validate_json(text).cases): options for text, _, options in ray.asked}
    assert needs[frozenset(on_gpu)]["num_gpus"] == 0.5
    assert needs[frozenset(on_cpu)]["num_cpus"] == 8  # all of that node
    assert needs[frozenset(on_cpu)]["scheduling_strategy"].node_id == fakeray.IDS["second"]


def test_what_has_a_record_is_timed_again_beside_what_has_none(on_cluster: Any) -> None:
    made, ray = on_cluster(work=CaseWork(Progress(), done=lambda case: case.scheme == "exact"))

    list(made.outcomes([case.model_copy(update={"meter": "cuda"}) for case in CASES[1:]]))
    list(made.outcomes([case.model_copy(update={"meter": "cuda"}) for case in CASES]))

    assert [request.known_exact for request in requests(ray)] == [True, False]


def test_a_second_batch_of_cases_needs_no_other_function(on_cluster: Any) -> None:
    made, ray = on_cluster()
    for case in CASES:
        assert dict(made.outcomes([case])) == {case: MEASURED}

    assert (ray.calls["remote"], ray.calls["put"]) == (1, 1)


def test_a_case_that_ends_its_process_twice_is_a_row(on_cluster: Any, each: Any) -> None:
    pytest.importorskip("ray")
    crashed = Failure(reason="crash", message="it died")
    made, ray = on_cluster(each(crashed))

    assert list(made.outcomes(CASES[:1])) == [(CASES[0], crashed)]
    assert len(ray.asked) == 2


def test_a_node_that_is_lost_is_a_row_with_the_reason(on_cluster: Any, fakeray: Any) -> None:
    def lost(text: str, task: int) -> str:
        raise fakeray.RayError("The node died.\nmore")

    made, _ = on_cluster(lost)
    [(case, outcome)] = made.outcomes(CASES[:1])

    assert isinstance(outcome, Failure)
    assert outcome.reason == "crash"
    assert outcome.message == "the worker or node of the case was lost, twice: The node died."
    assert made.origins.pop(case)["machine"] == provenance("")["machine"]


def test_a_node_with_another_actbench_refuses() -> None:
    request = node.Request(cases=(), timeout_seconds=None)
    shared = node.Shared(files={}, sources="other")

    with pytest.raises(MeasurementError, match=r"another actbench .* install the same on all nodes"):
        node.measure(request.model_dump_json(), shared.model_dump_json())


def test_another_gpu_or_number_of_threads_gets_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of Ray's does tasks that see different devices, and its server has the environment that it began in."""
    made: list[str] = []

    class Server:
        def __init__(self, bench: str, preload: tuple[str, ...], kind: str) -> None:
            self.name = bench
            made.append(f"begin {bench}")

        def close(self) -> None:
            made.append(f"end {self.name}")

    monkeypatch.setattr(node, "ForkServer", Server)
    serving = node._Serving()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first = serving.server("a", (), "case")
    assert serving.server("a", (), "case") is first
    for name, value in (("CUDA_VISIBLE_DEVICES", "1"), ("OMP_NUM_THREADS", "8")):
        monkeypatch.setenv(name, value)
        assert serving.server("a", (), "case") is not first
    assert serving.server("b", (), "case").name == "b"

    assert made == ["begin a", *["end a", "begin a"] * 2, "end a", "begin b"]


@pytest.mark.parametrize(
    ("verb", "flags", "naming"),
    [
        ("sweep", ["--gpus-per-case", "1"], "--gpus-per-case: only with --cluster"),
        ("sweep", ["--cluster", "auto", "--resources", "a100"], "'a100': give a name and an amount of at least"),
        ("sweep", ["--cluster", "auto", "--resources", "GPU=2"], "--gpus-per-case says how many"),
        ("sweep", ["--cluster", "auto", "--gpus-per-case", "1.5"], "--gpus-per-case 1.5: give a part of one GPU"),
        ("sweep", ["--cluster", "auto", "--gpus-per-case", "0"], "--gpus-per-case 0: give"),
        ("sweep", ["--cluster", "auto", "--resources", "a100=-1"], "--resources 'a100=-1'"),
        ("fit", ["--device-profile", "rtx-4090", "--resources", "a100=1"], "--resources: only with --cluster"),
    ],
)
def test_flags_that_say_nothing_are_refused(cli: Any, verb: str, flags: list[str], naming: str) -> None:
    cli.refused(verb, "tiny-bert", "-s", "checkpoint", *flags, naming=naming)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)

    with pytest.raises(UsageError, match=r"pip install 'actbench\[cluster\]'"), Cluster("auto").connected():
        pass
