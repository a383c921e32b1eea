"""Tasks on a cluster: how many are handed over, and what becomes of those that are lost. Ray is a stand-in here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from actbench.errors import MeasurementError, UsageError
from actbench.experiments.cluster import cluster, tasks
from actbench.experiments.cluster.cluster import Needs
from actbench.experiments.cluster.node import Reply
from actbench.experiments.cluster.tasks import LostTask, RayTasks


class Said(Reply):
    """A reply with a text, which says whether something crashed."""

    said: str


def on_node(text: str, shared: str) -> str:
    raise AssertionError("a stand-in answers")


@dataclass
class Words:
    """Work on words."""

    told: list[str] = field(default_factory=list)
    function: Callable[[str, str], str] = on_node

    def request(self, item: str) -> str:
        return item

    def reply(self, text: str) -> Said:
        return Said.model_validate_json(text)

    def crashed(self, reply: Said) -> bool:
        return reply.said == "crashed"

    def started(self, item: str) -> None:
        self.told.append(item)


ONE_CORE = Needs("a word", {"CPU": 1.0})
SHORT = Needs("a word", {"CPU": 1.0}, is_short=True)
ALL_CORES = Needs("a word", {"CPU": 1.0}, whole_node=True)
WORDS = [f"word {number}" for number in range(60)]


@pytest.fixture
def said(fakeray: Any) -> Callable[..., str]:
    """Return a maker of replies."""
    return lambda text="well", host="first": Said(said=text, **fakeray.where(host)).model_dump_json()


@pytest.fixture
def asked(fakeray: Any, said: Callable[..., str]) -> Callable[..., Any]:
    """Return a maker of a stand-in, the work and its tasks; every answer is well unless given."""

    def make(answer: Any = None) -> tuple[Any, Words, RayTasks[str, Said]]:
        ray, work = fakeray.FakeRay(answer or (lambda request, task: said())), Words()
        return ray, work, RayTasks(ray, work, "shared")

    return make


def test_every_item_comes_back_once(asked: Any) -> None:
    ray, work, made = asked()

    found = list(made.replies(WORDS, ONE_CORE))

    assert sorted(item for item, _ in found) == sorted(WORDS)
    assert {reply.said for _, reply in found} == {"well"}
    assert work.told == WORDS
    assert [(request, shared) for request, shared, _ in ray.asked] == [(word, "shared") for word in WORDS]


@pytest.mark.parametrize(("needs", "most"), [(ONE_CORE, 12), (SHORT, 24), (ALL_CORES, 2)])
def test_as_many_are_handed_over_as_run_at_a_time_or_the_next_ones_too(asked: Any, needs: Needs, most: int) -> None:
    pytest.importorskip("ray")
    ray, _, made = asked()

    assert len(list(made.replies(WORDS, needs))) == len(WORDS)
    assert ray.most_flying == most


def test_what_is_handed_over_early_is_told_when_there_is_room_for_it(asked: Any) -> None:
    ray, work, made = asked()
    told_at = []
    for _ in made.replies(WORDS, SHORT):
        told_at.append((len(ray.asked), len(work.told)))

    assert told_at[0] == (24, 12)
    assert all(handed - told <= 12 for handed, told in told_at)
    assert sorted(work.told) == sorted(WORDS)


@pytest.mark.parametrize("at_a_time", [1, 7])
def test_the_cluster_is_asked_little(asked: Any, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function, one shared text, and what nodes there are once, however many tasks there are."""
    monkeypatch.setattr(tasks, "LOOK_SECONDS", 1000.0)
    monkeypatch.setattr(cluster, "LOOK_SECONDS", 1000.0)
    ray, _, made = asked()
    ray.ended_at_a_time = at_a_time

    assert len(list(made.replies(WORDS, SHORT))) == len(WORDS)
    assert ray.calls == {"nodes": 1, "remote": 1, "put": 1}


def test_nodes_that_come_later_are_used(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOK_SECONDS", -1.0)
    ray, _, made = asked()
    found = made.replies(WORDS, ONE_CORE)
    next(found)
    ray.cores["second"] = 20.0
    list(found)

    assert ray.most_flying == 24


def test_tasks_that_take_whole_nodes_are_spread_over_them(asked: Any, fakeray: Any) -> None:
    pytest.importorskip("ray")
    ray, _, made = asked()
    found = made.replies(WORDS[:8], ALL_CORES)
    next(found)
    first, second = (options for _, _, options in ray.asked[:2])

    assert (first["num_cpus"], second["num_cpus"]) == (8, 4)
    assert first["scheduling_strategy"].node_id == fakeray.IDS["second"]
    assert second["scheduling_strategy"].node_id == fakeray.IDS["first"]
    assert not first["scheduling_strategy"].soft
    assert len(list(found)) == 7


@pytest.mark.parametrize("second", ["well", "crashed"])
def test_what_ends_its_process_is_tried_once_more_elsewhere(asked: Any, said: Any, fakeray: Any, second: str) -> None:
    pytest.importorskip("ray")
    answers = [said("crashed"), said(second, "second")]
    ray, work, made = asked(lambda request, task: answers[task])

    [(item, reply)] = made.replies(WORDS[:1], ONE_CORE)

    assert (item, reply.said) == (WORDS[0], second)
    assert work.told == WORDS[:1]
    assert "scheduling_strategy" not in ray.asked[0][2]
    assert ray.asked[1][2]["scheduling_strategy"].node_id == fakeray.IDS["second"]


def test_what_is_lost_with_its_node_is_tried_on_another(asked: Any, said: Any, fakeray: Any) -> None:
    pytest.importorskip("ray")

    def answer(request: str, task: int) -> str:
        if task == 0:
            raise fakeray.RayError("the node died")
        return str(said())

    ray, _, made = asked(answer)
    [(_, reply)] = made.replies(WORDS[:1], ALL_CORES)

    assert reply.said == "well"
    chosen = [options["scheduling_strategy"].node_id for _, _, options in ray.asked]
    assert chosen == [fakeray.IDS["second"], fakeray.IDS["first"]]


def test_what_is_lost_twice_comes_back_with_the_reason(asked: Any, fakeray: Any) -> None:
    def lost(request: str, task: int) -> str:
        raise fakeray.RayError("The node died.\nmore")

    ray, _, made = asked(lost)

    assert list(made.replies(WORDS[:2], ONE_CORE)) == [(word, LostTask("The node died.")) for word in WORDS[:2]]
    assert len(ray.asked) == 4


@pytest.mark.parametrize(
    ("cause", "naming"),
    [
        (MeasurementError("the node x has another actbench"), "--cluster: the node x has another actbench"),
        (ModuleNotFoundError("No module named 'actbench'"), "a node has no actbench that can be imported"),
        (OSError("no space"), "a node failed: OSError: no space"),
    ],
)
def test_what_is_wrong_with_nodes_ends_all(asked: Any, fakeray: Any, cause: Exception, naming: str) -> None:
    def broken(request: str, task: int) -> str:
        raise fakeray.RayTaskError(cause)

    ray, _, made = asked(broken)

    with pytest.raises(MeasurementError, match=naming):
        list(made.replies(WORDS[:3], ONE_CORE))
    assert ray.cancelled == [1, 2]


def test_who_stops_taking_replies_cancels_what_runs(asked: Any) -> None:
    ray, _, made = asked()
    found = made.replies(WORDS, ONE_CORE)
    next(found)
    found.close()

    assert ray.cancelled == list(range(1, 12))


def test_nothing_begins_once_it_may_not(asked: Any) -> None:
    ray, work, made = asked()
    found = list(made.replies(WORDS, ONE_CORE, lambda: len(ray.asked) < 20))

    assert [item for item, _ in found] == WORDS[:20]
    assert work.told == WORDS[:20]


@pytest.mark.parametrize(
    ("amounts", "naming"),
    [
        ({"CPU": 1.0, "GPU": 2.0}, "no node has CPU=1, GPU=2, as a word asks for; nodes: first CPU=4, GPU=1"),
        ({"CPU": 1.0, "a10": 1.0}, "no node has CPU=1, a10=1"),
        ({"CPU": 9.0}, "no node has CPU=9"),
    ],
)
def test_what_no_node_has_is_refused(asked: Any, amounts: dict[str, float], naming: str) -> None:
    _, _, made = asked()

    with pytest.raises(UsageError, match=f"--cluster: {naming}"):
        list(made.replies(WORDS, Needs("a word", amounts)))


@pytest.mark.parametrize(
    ("amounts", "options"),
    [
        ({"CPU": 1.0, "a100": 0.5}, {"num_cpus": 1, "resources": {"a100": 0.5}}),
        ({"CPU": 1.0, "GPU": 0.5}, {"num_cpus": 1, "num_gpus": 0.5, "resources": {}}),
        ({"CPU": 1.0, "memory": 8e9}, {"num_cpus": 1, "memory": 8e9, "resources": {}}),
    ],
)
def test_amounts_are_asked_for_as_ray_names_them(asked: Any, amounts: dict[str, float], options: Any) -> None:
    ray, _, made = asked()
    list(made.replies(WORDS[:1], Needs("a word", amounts)))

    assert ray.asked[0][2] == options


@pytest.mark.parametrize(
    ("amounts", "most"),
    [({"CPU": 2.0}, 6), ({"CPU": 3.0}, 3), ({"CPU": 1.0, "GPU": 0.5}, 4), ({"CPU": 1.0, "memory": 40e9}, 2)],
)
def test_no_more_are_handed_over_than_nodes_have_room_for(asked: Any, amounts: dict[str, float], most: int) -> None:
    ray, _, made = asked()
    list(made.replies(WORDS, Needs("a word", amounts)))

    assert ray.most_flying == most
