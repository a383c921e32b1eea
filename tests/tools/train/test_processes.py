from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from actbench.errors import MeasurementError, UsageError
from actbench.tools.train.comparison import run
from actbench.tools.train.launch import Launch
from actbench.tools.train.loop import seed_of
from actbench.tools.train.processes import SINGLE_PROCESS, LostError, ProcessGroup, StoppedError
from actbench.tools.train.recipe import load

FIRST = ProcessGroup(Launch(rank=0, size=2, strategy="ddp"))
SECOND = ProcessGroup(Launch(rank=1, size=2, strategy="ddp"))


def failing() -> None:
    raise UsageError("no such file")


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a box with what the other process says, last."""
    said: list[Any] = [None]

    def gather(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value, said[-1]] if said[0] is None else [said[-1], value]

    monkeypatch.setattr(distributed, "all_gather_object", gather)
    return said


def test_one_process_is_a_team() -> None:
    assert (SINGLE_PROCESS.rank, SINGLE_PROCESS.size, SINGLE_PROCESS.is_first) == (0, 1, True)
    assert SINGLE_PROCESS.all_gather("a") == ["a"]
    assert SINGLE_PROCESS.broadcast("a") == "a"
    assert SINGLE_PROCESS.mean(0.1) == 0.1
    assert SINGLE_PROCESS.all_succeed(lambda: 7) == 7
    with pytest.raises(UsageError, match="no such file"):
        SINGLE_PROCESS.all_succeed(failing)
    error = ValueError("x")
    assert SINGLE_PROCESS.end_run(error) is error
    assert SINGLE_PROCESS.end_run(None) is None


def test_the_first_process_says_what_went_wrong_in_it(other: list[Any]) -> None:
    with pytest.raises(UsageError, match="no such file"):
        FIRST.all_succeed(failing)


def test_the_first_process_says_what_went_wrong_in_another(other: list[Any]) -> None:
    other.append("no such file there")
    with pytest.raises(MeasurementError, match="process 1: no such file there"):
        FIRST.all_succeed(lambda: 7)
    assert str(FIRST.end_run(None)) == "process 1: no such file there"


def test_the_others_stop_and_say_nothing(other: list[Any]) -> None:
    other[:] = ["the first one's", "the first one's"]
    with pytest.raises(StoppedError):
        SECOND.all_succeed(lambda: 7)
    with pytest.raises(StoppedError):
        SECOND.all_succeed(failing)


def test_a_process_that_is_gone_ends_the_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(distributed, "all_gather_object", gone)
    with pytest.raises(LostError, match="closed by peer"):
        FIRST.all_succeed(lambda: 7)
    with pytest.raises(LostError, match="process 0 failed alone: out of memory"):
        FIRST.end_run(ValueError("out of memory"))
    with pytest.raises(LostError):
        run(load("digits"), tmp_path, command="", group=FIRST)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_processes_draw_other_numbers_and_the_first_those_of_one_process() -> None:
    assert seed_of(3, 0) == 3
    assert len({seed_of(seed, rank) for seed in range(3) for rank in range(4)}) == 12
