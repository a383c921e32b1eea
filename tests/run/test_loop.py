"""The loop over an executor: who is asked where, when nothing more begins, and what is stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from actbench.errors import MeasurementError
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.run.executor import Cases, Handle, Place, PlaceLostError, Told, Work
from actbench.run.local import LocalExecutor, StoppedError
from actbench.run.progress import Progress
from actbench.run.runner import outcomes

MEASURED = Measurement(weights_bytes=1, activation_bytes=2, peak_bytes=3)
WORK = Work(Progress(), "test")


class Stand:
    """An executor of two places, at which cases end when the test says so."""

    def __init__(self, ends: Callable[[Case], BaseException | None] = lambda case: None) -> None:
        self._ends = ends
        self.asked: list[tuple[Cases, Place]] = []
        self.stopped: list[Cases] = []

    def places(self, meter: str) -> Sequence[Place]:
        return [Place(meter, number) for number in range(2)]

    def submit(self, cases: Cases, on: Place, tell: Callable[[Told], object]) -> Handle:
        self.asked.append((cases, on))
        ended: Future[None] = Future()
        if "lasts" not in cases[0].scheme:
            error = self._ends(cases[0])
            for case in () if error else cases:
                tell((case, MEASURED, {}))
            ended.set_exception(error) if error else ended.set_result(None)
        return Handle(ended, lambda: self.stopped.append(cases))


def cases(meter: str, *schemes: str, batch_size: int = 1) -> list[Case]:
    return [Case(model="tiny", scheme=scheme, batch_size=batch_size, meter=meter) for scheme in schemes]


def test_simulated_cases_come_alone_and_those_that_are_timed_in_groups_by_device() -> None:
    plan = [*cases("cpu", "name:a", "exact"), *cases("cuda", "exact"), *cases("simulated", "exact", "name:a")]
    stand = Stand()

    assert [case for case, _, _ in outcomes(stand, WORK, plan)] == [plan[3], plan[4], plan[2], plan[1], plan[0]]
    assert [asked for asked, _ in stand.asked] == [(plan[3],), (plan[4],), (plan[2],), (plan[1], plan[0])]


def test_cases_of_the_meter_of_another_package_are_measured_too() -> None:
    plan = [case.model_copy(update={"meter": "watts"}) for case in cases("cpu", "exact", "name:a")]

    assert [case for case, _, _ in outcomes(Stand(), WORK, [*plan, *cases("cuda", "exact")])][1:] == plan


def test_a_place_has_one_unit_at_a_time() -> None:
    plan = cases("simulated", "lasts", "name:a", "name:b", "name:c")
    stand = Stand()
    found = outcomes(stand, WORK, plan)
    assert [next(found)[0].scheme for _ in range(3)] == ["name:a", "name:b", "name:c"]
    found.close()

    assert [place.number for _, place in stand.asked] == [0, 1, 1, 1]


def test_a_place_that_is_lost_meanwhile_costs_no_case() -> None:
    class Losing(Stand):
        left = 2

        def places(self, meter: str) -> Sequence[Place]:
            return super().places(meter)[-self.left :]

        def submit(self, cases: Cases, on: Place, tell: Callable[[Told], object]) -> Handle:
            if on.number == 0:
                self.left = 1
                raise PlaceLostError("the node is gone")
            return super().submit(cases, on, tell)

    plan = cases("simulated", "name:a", "name:b")
    stand = Losing()

    assert [case for case, _, _ in outcomes(stand, WORK, plan)] == plan
    assert [place.number for _, place in stand.asked] == [1, 1]


def test_an_error_of_one_place_stops_the_others() -> None:
    stand = Stand(lambda case: OSError("a GPU fell off the bus") if case.scheme == "bad" else None)

    with pytest.raises(OSError, match="fell off"):
        list(outcomes(stand, WORK, cases("simulated", "lasts", "bad", "name:a")))
    assert [stopped[0].scheme for stopped in stand.stopped] == ["lasts"]
    assert len(stand.asked) == 2


def test_a_case_that_hangs_is_stopped_once_it_may_not_go_on() -> None:
    class Hanging(Stand):
        def submit(self, cases: Cases, on: Place, tell: Callable[[Told], object]) -> Handle:
            handle = super().submit(cases, on, tell)
            if "lasts" not in cases[0].scheme:
                return handle

            def stop() -> None:
                handle.stop()
                handle.future.set_exception(StoppedError("stopped"))

            return Handle(handle.future, stop)

    stand, told = Hanging(), list[Case]()
    found = outcomes(stand, WORK, cases("simulated", "lasts", "name:a"), may_go_on=lambda: not told)
    for case, _, _ in found:
        told.append(case)

    assert [case.scheme for case in told] == ["name:a"]
    assert [stopped[0].scheme for stopped in stand.stopped] == ["lasts"]


def test_who_takes_no_more_stops_what_is_at_work() -> None:
    stand = Stand()
    found = outcomes(stand, WORK, cases("simulated", "lasts", "name:a"))
    next(found)
    found.close()

    assert "lasts" in [stopped[0].scheme for stopped in stand.stopped]


def test_nothing_begins_once_it_may_not() -> None:
    stand = Stand()
    plan = cases("simulated", *(f"name:{name}" for name in "abcdef"))

    found = list(outcomes(stand, WORK, plan, lambda: len(stand.asked) < 3))

    assert [case for case, _, _ in found] == plan[:3]


def test_cases_that_are_stopped_are_killed_and_tell_nothing(
    log: Path, ends: Any, assert_no_process_is_left: Any
) -> None:
    told: list[Told] = []
    plan = [Case(model=str(log), scheme=scheme, batch_size=1, meter="cpu") for scheme in ("exact", "hang")]
    work = Work(Progress(), "test", bench="fakebench", preload=())
    with ends(), LocalExecutor(work) as local:
        stopped = local.submit(tuple(plan), local.places("cpu")[0], told.append)
        with pytest.raises(TimeoutError):
            stopped.result(0.1)
        while "hang 1 begin" not in (log.read_text() if log.exists() else ""):
            pass
        stopped.stop()
        with pytest.raises(StoppedError):
            stopped.result(30)
        assert_no_process_is_left(log)  # while the executor is there for others
        other = plan[0].model_copy(update={"meter": "simulated"})
        local.submit((other,), local.places("simulated")[0], told.append).result(30)

    assert [case for case, _, _ in told] == [other]


def test_what_ends_the_fork_server_ends_the_work(log: Path, ends: Any) -> None:
    plan = (Case(model=str(log), scheme="hang", batch_size=1, meter="simulated"),)
    work = Work(Progress(), "test", bench="fakebench", preload=())
    with ends(), LocalExecutor(work) as local:
        handle = local.submit(plan, local.places("simulated")[0], lambda told: None)
        while "hang 1 begin" not in (log.read_text() if log.exists() else ""):
            pass
        local.server.close()
        with pytest.raises(MeasurementError, match="the process that starts the cases is gone"):
            handle.result(30)
