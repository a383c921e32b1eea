"""The time that is left, as told from the cases that ended."""

from __future__ import annotations

import pytest

from actbench.run import pace
from actbench.run.pace import Pace


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_time_before_the_first_case_is_no_part_of_the_pace(clock: Clock) -> None:
    told = Pace()
    told.planned(range(20))
    clock.now = 15.0
    told.case_started(0)
    assert told.seconds_left(20) is None
    clock.now = 16.0
    told.case_ended(0)

    assert told.seconds_left(20) == 19


@pytest.mark.parametrize("jobs", [1, 4])
def test_cases_that_work_side_by_side_count_as_many_times(clock: Clock, jobs: int) -> None:
    told, left = Pace(), []
    for wave in range(0, 16, jobs):
        for case in range(wave, wave + jobs):
            told.case_started(case)
        clock.now += 10.0
        for case in range(wave, wave + jobs):
            told.case_ended(case)
            left.append(told.seconds_left(16))

    assert left == pytest.approx([10.0 * (16 // jobs - 1 - place // jobs) for place in range(16)])


def test_cases_that_take_turns_are_not_counted_one_behind_the_other(clock: Clock) -> None:
    told = Pace()
    for case in range(5):
        told.case_started(case)
        clock.now += 2.0
    for case in range(5):
        told.case_ended(case)

    assert told.seconds_left(20) == pytest.approx(30)


def test_a_case_that_takes_long_does_not_hide_those_that_wait(clock: Clock) -> None:
    told = Pace()
    told.case_started(0)
    told.case_started(1)
    clock.now = 2.0
    told.case_ended(0)
    clock.now = 1000.0

    assert told.seconds_left(4) == pytest.approx(4, rel=0.01)


def test_the_last_case_has_nothing_beside_it(clock: Clock) -> None:
    told = Pace()
    for case in range(4):
        told.case_started(case)
    clock.now = 8.0
    for case in range(4):
        told.case_ended(case)
    told.case_started(4)

    assert told.seconds_left(5) == 8
    told.case_ended(4)
    assert told.seconds_left(5) == 0


def test_other_cases_begin_anew(clock: Clock) -> None:
    told = Pace()
    told.case_started(0)
    clock.now = 100.0
    told.case_ended(0)
    told.planned([1, 2])

    assert (told.ended, told.seconds_left(2)) == (0, None)
