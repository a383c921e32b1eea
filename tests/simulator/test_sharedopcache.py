"""What one process learned of operators, another begins with; a process that is killed while it writes harms none."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from actbench.simulator import sharedopcache
from actbench.simulator.cachingmode import CachingFakeMode, starting_from
from actbench.simulator.fake import fake_mode
from actbench.simulator.sharedopcache import SharedOpCache


@pytest.fixture
def recipes() -> Iterator[SharedOpCache]:
    """Recipes of no process."""
    with tempfile.TemporaryFile() as file:
        yield SharedOpCache(file.fileno())


others = recipes


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Operators that torch's mode ran."""
    found: list[Any] = []
    run = FakeTensorMode.__torch_dispatch__

    def noting(self: Any, func: Any, *args: Any) -> Any:
        found.append(func)
        return run(self, func, *args)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", noting)
    return found


def forked(call: Callable[[], object]) -> int:
    """Call a function in a process that is forked from this one, and return how the process ended."""
    if (pid := os.fork()) == 0:
        try:
            call()
        except BaseException:  # or pytest would go on in it
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def network(x: torch.Tensor) -> list[torch.Tensor]:
    norm = F.batch_norm(x, torch.empty(4), torch.empty(4), training=True)
    parts = norm.flatten(1).split(6, dim=1)
    return [*parts, F.relu(parts[0]).t(), *torch._foreach_add([x, norm], 1.0)]


def results(recipes: SharedOpCache) -> list[Any]:
    """Run the network in a new mode, and return all that one sees of its results."""
    taken = recipes.load("card")
    with starting_from(taken.known), fake_mode() as mode:
        found = network(torch.empty(2, 4, 3, 3))
        assert all(each.fake_mode is mode for each in found)
    taken.publish()
    storages = [each.untyped_storage()._cdata for each in found]
    return [
        (each.shape, each.stride(), each.dtype, each.device, each.storage_offset(), storages.index(storage))
        for each, storage in zip(found, storages, strict=True)
    ]


def learn_one_more(recipes: SharedOpCache) -> None:
    taken = recipes.load("card")
    with starting_from(taken.known), fake_mode():
        torch.empty(7).relu()
    taken.publish()


def known(recipes: SharedOpCache, device: str = "card") -> set[Any]:
    return set(recipes.load(device).known)


def test_a_process_begins_with_what_another_learned(
    recipes: SharedOpCache, others: SharedOpCache, ran: list[Any]
) -> None:
    assert forked(lambda: results(recipes)) == 0

    shared = results(recipes)
    assert ran == []
    assert shared == results(others)
    assert ran


def test_what_was_refreshed_is_not_read_again(recipes: SharedOpCache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forked(lambda: results(recipes)) == 0
    recipes.refresh()
    loads = list[bytes]()
    monkeypatch.setattr("actbench.simulator.sharedopcache.pickle.loads", loads.append)

    assert len(known(recipes)) > 2
    assert known(recipes, "another") == set()
    assert loads == []


def test_an_operator_that_is_registered_later_is_known_then(
    recipes: SharedOpCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forked(lambda: results(recipes)) == 0
    with monkeypatch.context() as patched:
        patched.setattr(sharedopcache, "_operator", lambda name: None)
        assert known(recipes) == set()

    assert len(known(recipes)) > 2


def test_a_mode_alone_begins_with_nothing(recipes: SharedOpCache, ran: list[Any]) -> None:
    results(recipes)
    first = len(ran)
    with CachingFakeMode():
        network(torch.empty(2, 4, 3, 3))
    assert len(ran) == 2 * first


def test_what_another_process_adds_meanwhile_stays(recipes: SharedOpCache) -> None:
    taken = recipes.load("card")
    with starting_from(taken.known), fake_mode():
        torch.empty(7).relu()
    assert forked(lambda: results(recipes)) == 0
    taken.publish()
    assert known(recipes) > set(taken.known)


def test_what_is_learned_of_one_device_is_not_known_of_another(recipes: SharedOpCache) -> None:
    results(recipes)
    forked(lambda: recipes.load("another").publish())
    learn_one_more(recipes)
    assert known(recipes, "another") == set()
    assert len(known(recipes)) > 2


def test_a_process_that_is_killed_while_it_writes_leaves_what_was_there(
    recipes: SharedOpCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    results(recipes)
    before = known(recipes)

    def killed() -> None:
        write = os.pwrite

        def half(file: int, data: bytes, offset: int) -> int:
            write(file, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        monkeypatch.setattr(os, "pwrite", half)
        learn_one_more(recipes)

    assert forked(killed) == -signal.SIGKILL
    assert known(recipes) == before
    assert forked(lambda: learn_one_more(recipes)) == 0
    assert known(recipes) > before, "the lock is free"


def test_what_there_is_no_space_for_is_left_out_and_others_go_on(recipes: SharedOpCache) -> None:
    learn_one_more(recipes)
    before = known(recipes)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does, which then gets an error or a short write
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        assert len(results(recipes)) > 2

    assert forked(limited) == 0
    assert known(recipes) == before
    results(recipes)
    assert known(recipes) > before


def test_a_full_file_or_one_that_cannot_be_locked_costs_nothing_but_time(
    recipes: SharedOpCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sharedopcache, "_MOST_BYTES", 10)
        results(recipes)
        assert known(recipes) == set()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "lockf", refuse)
        results(recipes)
        assert known(recipes) == set()
    results(recipes)
    assert known(recipes) != set()
