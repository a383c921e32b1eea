"""The table that progress on a terminal draws."""

from __future__ import annotations

import time

import pytest
from drawnprogress import MEASURED, cases, console, text_of

from actbench.model.data import CaseData, OutcomeData
from actbench.run import display
from actbench.run.display import LiveTable, shown
from actbench.run.progress import Progress
from actbench.run.progresslines import ProgressLines
from actbench.units import GIB


def test_what_waits_to_be_told_is_told_by_the_clock_and_in_the_end():
    where = console(terminal=False)
    first, second, third = cases(3)
    told = ProgressLines(where)
    with told.ticking(seconds=0.001):
        told.planned([first, second, third])
        for case in (first, second):
            told.finished(case, MEASURED)
        while "[2/3]" not in where.file.getvalue():
            time.sleep(0.01)
        told.finished(third, MEASURED)
    assert where.file.getvalue().splitlines()[-1].startswith("[3/3]")


def test_the_table_tells_what_is_left_by_the_cases_that_ended(monkeypatch):
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    first, second, third = cases(3)
    table = LiveTable(console(terminal=True))
    table.planned([first, second, third])
    now = 40.0
    table.started(first)
    assert "left: -:--:--" in text_of(table)
    now = 60.0
    table.finished(first, MEASURED)
    table.started(second)
    now = 65.0
    assert "left: 0:00:35" in text_of(table)


def test_rows_of_the_table_tell_optimizers_apart():
    table = LiveTable(console(terminal=True))
    case = cases(1)[0]
    table.planned([case, case.model_copy(update={"optimizer": "adamw-fused"})])
    assert "fewbit:3, adamw-fused" in text_of(table)


def test_the_table_follows_a_case_through_its_states():
    [case] = cases(1)
    table = LiveTable(console(terminal=True))
    table.planned([case], 1)
    assert "waiting" in text_of(table)
    table.started(case)
    assert "first step" in text_of(table)
    table.memory_read(case, 3 * GIB)
    assert "3.00 GiB" in text_of(table)
    table.round_timed(case, 4)
    assert "4 steps timed" in text_of(table)
    table.tried(case, 73, False)
    assert "batch 73 does not fit" in text_of(table)
    table.finished(case, MEASURED)
    assert "measured" in text_of(table)
    assert "1 of 1 cases" in text_of(table)


@pytest.mark.parametrize("ended", [0, 30, 50])
def test_a_long_table_keeps_the_cases_at_work_in_sight(ended):
    many = cases(50)
    table = LiveTable(console(terminal=True, height=20))
    table.planned(many, 1)
    for case in many[:ended]:
        table.started(case)
        table.finished(case, MEASURED)
    text = text_of(table, height=20)
    assert f"model{min(ended, 49)} " in text
    assert len(text.splitlines()) <= 20


@pytest.mark.parametrize("terminal", [True, False])
def test_all_that_is_told_can_be_shown(terminal):
    [case] = cases(1)
    with shown(console(terminal=terminal)) as made:
        told: Progress = made
        told.planned([case], 2)
        told.started(case)
        told.memory_read(case, 1)
        told.round_timed(case, 1)
        told.tried(case, 1, True)
        told.noted(case, "text")
        told.message("text")
        told.finished(case, MEASURED)


class Brew(CaseData):
    name: str


class Cups(OutcomeData):
    cups: int


def test_a_kind_that_says_no_more_has_its_names_in_lines_and_in_the_table():
    where, table, case = console(terminal=False), LiveTable(console(terminal=True)), Brew(name="assam")
    with shown(where, verbose=True) as lines:
        for told in (lines, table):
            told.planned([case])
            told.started(case)
            told.finished(case, Cups(cups=3))
    assert where.file.getvalue().splitlines() == ["starts: assam", "[1/1] assam: measured"]
    heading, _, row = text_of(table).splitlines()[1:4]
    assert heading.strip("┃ ").split() == ["case", "┃", "state", "┃", "peak", "┃", "time"]
    assert row.strip("│ ").split()[:3] == ["assam", "│", "measured"]
