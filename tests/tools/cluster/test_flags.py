"""What is asked of a cluster: by flags, and by a cluster's nodes."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from actbench import plugins
from actbench.cli.clusters import GpuClusterFlags
from actbench.errors import UsageError
from actbench.model.data import CaseData
from actbench.model.records import Case
from actbench.run.executor import Place, PlaceLostError, Work
from actbench.run.progress import Progress
from actbench.tools.cluster.cluster import Nodes, connected
from actbench.tools.cluster.executor import Cluster, RayExecutor, _asking

HAS = {"GPU": 1.0, "a100": 1.0, "memory": 64e9, "node:10.0.0.1": 1.0}


class TwoNodes:
    """Stands for the module ``ray`` where it is asked which nodes there are."""

    names = ("first", "second")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": alive, "NodeManagerHostname": name, "NodeID": name, "Resources": {**HAS, "CPU": cores}}
            for name, cores, alive in (
                ("first", 4.0, True),
                ("second", 8.0, "second" in self.names),
                ("gone", 99.0, False),
            )
        ]

    def remote(self, function: object) -> object:
        return function

    def put(self, text: str) -> str:
        return text


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
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(UsageError, match=r"pip install 'actbench\[cluster\]'"), connected("auto"):
        pass


def test_without_the_plug_in_that_is_said(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = plugins.installed
    monkeypatch.setattr(plugins, "installed", lambda group: {} if group == "executors" else installed(group))

    cli.refused("fit", "tiny-bert", "--cluster", "auto", naming="--cluster: no installed package measures on a cluster")


def brewery(address: str, gpus: float, resources: dict[str, float]) -> Any:
    raise UsageError(f"brewed at {address!r} with {gpus} and {resources}")


def failing(address: str, gpus: float, resources: dict[str, float]) -> Any:
    raise KeyError("kettle")


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install executors of another package beside actbench's own."""
    objects = {"brew": brewery, "fails": failing, "text": "no executor"}
    installed, imported = plugins.installed, plugins._imported
    found = {name: plugins.Plugin(name, EntryPoint(name, "theirs:x", "actbench.executors")) for name in objects}
    monkeypatch.setattr(plugins, "installed", lambda group: installed(group) | (found if group == "executors" else {}))
    monkeypatch.setattr(
        plugins, "_imported", lambda each: (objects[each.name], None) if each.name in objects else imported(each)
    )


@pytest.mark.parametrize(
    ("address", "naming"),
    [
        ("brew://kettle:1", "brewed at 'kettle:1' with 1.0 and {'tea': 2.0}"),
        ("fails://", "--cluster fails://: fails cannot be used: KeyError: 'kettle'"),
        ("nobody://x", "--cluster nobody://x: no installed package brings the executor 'nobody', or it cannot be used"),
        ("nobody://x", "; there are: ray://, brew://, fails://, text://"),
        ("text://x", "plug-in 'text' (executors) of actbench is left out: theirs:x is a str and no Opening"),
        ("ranks://x", "no installed package brings the executor 'ranks'"),
    ],
)
@pytest.mark.usefixtures("theirs")
def test_a_cluster_is_the_executor_of_its_name(cli: Any, address: str, naming: str) -> None:
    cli.refused("sweep", "tiny-bert", "-s", "exact", "--cluster", address, "--resources", "tea=2", naming=naming)


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "head:6379", "::1"])
def test_what_names_no_executor_is_an_address_of_ray(address: str) -> None:
    assert GpuClusterFlags(address, "a100=1", 0.5).chosen == Cluster(address, 0.5, {"a100": 1.0})


@pytest.mark.parametrize(
    ("amounts", "naming"),
    [
        ({"CPU": 1.0, "GPU": 2.0}, "a case needs CPU=1, GPU=2, and no node has that; nodes: first CPU=4, GPU=1"),
        ({"CPU": 1.0, "a10": 1.0}, "a case needs CPU=1, a10=1"),
        ({"CPU": 9.0}, "a case needs CPU=9"),
    ],
)
def test_what_no_node_has_is_refused(amounts: dict[str, float], naming: str) -> None:
    with pytest.raises(UsageError, match=f"--cluster: {naming}"):
        Nodes(TwoNodes()).able("a case", amounts)


@pytest.mark.parametrize(
    ("amounts", "options"),
    [
        ({"CPU": 1.0, "a100": 0.5}, {"num_cpus": 1, "resources": {"a100": 0.5}}),
        ({"CPU": 1.0, "GPU": 0.5}, {"num_cpus": 1, "num_gpus": 0.5, "resources": {}}),
        ({"CPU": 1.0, "memory": 8e9}, {"num_cpus": 1, "memory": 8e9, "resources": {}}),
    ],
)
def test_amounts_are_asked_for_as_ray_names_them(amounts: dict[str, float], options: Any) -> None:
    assert _asking(amounts) == options


def test_there_are_as_many_places_as_tasks_run_at_a_time() -> None:
    def places(meter: Any, **settings: Any) -> list[Place]:
        return list(RayExecutor(TwoNodes(), Cluster("auto", **settings), Work(Progress(), "")).places(meter))

    assert len(places("simulated")) == 12
    assert len(places("simulated", resources={"memory": 40e9})) == 2
    assert len(places("cuda", gpus=0.5)) == 4
    assert places("cpu") == [Place("second"), Place("first")]  # a node each, the largest first
    assert places("watts") == places("cpu")  # what another package measures may be disturbed, too


class Began(Progress):
    """Notes the cases that begin."""

    def __init__(self) -> None:
        self.cases: list[CaseData] = []

    def started(self, case: CaseData, steps: int = 0, done: int = 0) -> None:
        self.cases.append(case)


def test_a_node_that_goes_before_its_task_comes_is_a_lost_place() -> None:
    ray = TwoNodes()
    executor = RayExecutor(ray, Cluster("auto"), Work(began := Began(), ""))
    place = executor.places("cpu")[0]
    ray.names = ("first",)
    executor._nodes.look_again()
    case = Case(model="tiny-bert", scheme="exact", batch_size=1, meter="cpu")

    with pytest.raises(PlaceLostError, match="the node second is gone"):
        executor.submit((case,), place, lambda told: None)
    assert executor.places("cpu") == [Place("first")]
    assert began.cases == []
