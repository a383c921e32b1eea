"""Several GPUs of one machine, which stand-ins take the place of: none is needed here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actbench.machine import Gpu
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case
from actbench.run import local
from actbench.run.local import ThisMachine, chosen_gpus
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned
from actbench.run.runner import run_plan

SMALL, LARGE = ("NVIDIA T4", 16), ("NVIDIA A100", 80)


class Rows:
    """A store in memory; ``stops_at`` is how many rows it takes before the user interrupts."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.records: list[MeasuredRecord] = []
        self._stops_at = stops_at

    def done(self, case: Any) -> bool:
        return False

    failed = done

    def find(self, case: Case) -> MeasuredRecord | None:
        return next((record for record in reversed(self.records) if record.case == case), None)

    def append(self, record: MeasuredRecord) -> None:
        if len(self.records) == self._stops_at:
            raise KeyboardInterrupt
        self.records.append(record)


def swept(log: Path, cases: list[Case], gpus: tuple[str | None, ...], rows: Rows | None = None) -> list[list[str]]:
    """Measure cases on GPUs, and return the events of the log: scheme, batch size, event and more."""
    settings: dict[str, Any] = {"recipe": "test", "command": "actbench sweep", "bench": "fakebench", "preload": ()}
    run_plan([Planned(case) for case in cases], rows or Rows(), machines=ThisMachine(gpus), **settings)
    return [line.split() for line in log.read_text().splitlines()]


def group(log: Path, batch_size: int, *schemes: str, **settings: Any) -> list[Case]:
    settings = {"meter": "cuda", "min_steps": 10, "min_seconds": 0.0, **settings}
    return [Case(model=str(log), scheme=scheme, batch_size=batch_size, **settings) for scheme in schemes]


@pytest.mark.parametrize(
    ("kinds", "jobs", "expected", "told"),
    [
        ([], 4, (None,), 0),
        ([LARGE], 4, (None,), 0),
        ([LARGE, LARGE], None, ("GPU-0",), 0),
        ([LARGE, LARGE], 1, ("GPU-0",), 0),
        ([LARGE, LARGE, LARGE], 2, ("GPU-0", "GPU-1"), 0),
        ([LARGE, LARGE], 8, ("GPU-0", "GPU-1"), 0),
        ([LARGE, SMALL, LARGE], 3, ("GPU-0", "GPU-2"), 1),
        ([LARGE, SMALL, LARGE], 2, ("GPU-0", "GPU-2"), 0),
        ([SMALL, LARGE, LARGE], 2, ("GPU-0",), 1),
        ([LARGE, ("NVIDIA A100", 40)], 2, ("GPU-0",), 1),
    ],
)
def test_gpus_of_the_first_one_s_kind_measure(
    kinds: list[tuple[str, int]],
    jobs: int | None,
    expected: tuple[str | None, ...],
    told: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = tuple(Gpu(name, memory, "580.1", f"GPU-{at}") for at, (name, memory) in enumerate(kinds))
    monkeypatch.setattr(local, "find_gpus", lambda: gpus)
    messages: list[str] = []
    progress = Progress()
    monkeypatch.setattr(progress, "message", messages.append)

    assert chosen_gpus(jobs, progress) == expected
    assert len(messages) == told
    assert all("GPUs measure, those that are" in message for message in messages)


def test_a_parted_gpu_is_left_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu(*LARGE, "580.1", None), Gpu(*LARGE, "580.1", "GPU-1"))
    monkeypatch.setattr(local, "find_gpus", lambda: gpus)

    assert chosen_gpus(2, Progress()) == (None,)


def test_two_gpus_do_two_groups_side_by_side(log: Path, ends: Callable[[], Any]) -> None:
    """Each group waits for the other one to begin: one behind the other they would wait for ever."""
    cases = [*group(log, 1, "exact+meets:2+gpu"), *group(log, 2, "exact+meets:1+gpu")]
    with ends():
        found = swept(log, cases, ("GPU-a", "GPU-b"))

    assert {event[3] for event in found if event[2] == "gpu"} == {"GPU-a", "GPU-b"}


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("gpus", [("GPU-a", "GPU-b"), ("GPU-a", "GPU-b", "GPU-c")])
def test_a_group_stays_on_one_gpu_that_does_one_group_at_a_time(log: Path, gpus: tuple[str, ...]) -> None:
    sizes = range(1, 8)
    cases = [case for size in sizes for case in group(log, size, "exact+gpu", "name:b+gpu+then+gpu", "sleep:0.05+gpu")]
    found = swept(log, cases, gpus)

    seen = {size: {event[3] for event in found if event[2] == "gpu" and event[1] == str(size)} for size in sizes}
    assert all(len(names) == 1 for names in seen.values())
    on = {size: names.pop() for size, names in seen.items()}
    assert set(on.values()) == set(gpus)
    for gpu in gpus:
        order = [event[1] for event in found if on[int(event[1])] == gpu]
        assert [size for at, size in enumerate(order) if at == 0 or order[at - 1] != size] == list(dict.fromkeys(order))


def test_all_rows_come_and_each_group_has_a_round_of_its_own(log: Path) -> None:
    cases = [case for size in (1, 2, 3) for case in group(log, size, "exact", "name:b")]
    rows = Rows()
    swept(log, cases, ("GPU-a", "GPU-b"), rows)

    assert {record.case for record in rows.records} == set(cases)
    rounds = {record.case: getattr(record.outcome, "timing_round", None) for record in rows.records}
    assert all(rounds[one] == rounds[other] for one in cases for other in cases if one.batch_size == other.batch_size)
    assert len(set(rounds.values())) == 3


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("gpu", "seen"), [(None, "as-here"), ("GPU-b", "GPU-b")])
def test_one_gpu_does_one_after_the_other(
    log: Path, gpu: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = swept(log, [*group(log, 1, "exact+gpu"), *group(log, 2, "exact+gpu")], (gpu,))

    assert [event[1] for event in found] == sorted(event[1] for event in found)
    assert {event[3] for event in found if event[2] == "gpu"} == {seen}


def test_what_runs_on_the_cpu_has_nothing_beside_it(log: Path) -> None:
    on_gpus = [case for size in (1, 2) for case in group(log, size, "exact+sleep:0.2")]
    on_cpu = [case for size in (3, 4) for case in group(log, size, "exact", meter="cpu")]
    found = swept(log, [*on_cpu, *on_gpus], ("GPU-a", "GPU-b"))
    order = [int(event[1]) for event in found]

    assert order[-len([size for size in order if size > 2]) :] == sorted(size for size in order if size > 2)


def test_trials_of_the_largest_batch_run_on_the_gpu_of_their_case(log: Path) -> None:
    settings = {"find_largest_batch": True, "memory_limit_bytes": 1100}
    cases = [case for size in (1, 2) for case in group(log, size, f"exact+gpu+name:{size}", **settings)]
    rows = Rows()
    found = swept(log, cases, ("GPU-a", "GPU-b"), rows)

    ended = [record for record in rows.records if not record.awaits_search]
    assert [getattr(record.outcome, "largest_batch", None) for record in ended] == [10, 10]
    for size in (1, 2):
        asked = {tuple(event[3:]) for event in found if event[2] == "gpu" and f"name:{size}" in event[0]}
        assert len(asked - {()}) == 1  # what is simulated beforehand hides all GPUs


def test_ctrl_c_ends_all_that_measures(log: Path, ends: Any, assert_no_process_is_left: Any) -> None:
    cases = [*group(log, 1, "exact+meets:2"), *group(log, 2, "exact+hang"), *group(log, 3, "exact")]
    with ends(), pytest.raises(KeyboardInterrupt):
        swept(log, cases, ("GPU-a", "GPU-b"), Rows(stops_at=0))

    assert_no_process_is_left(log)
    assert " 3 begin" not in log.read_text()
