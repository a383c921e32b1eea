"""Reports of the memory of a case: when they are made, by the clock, and of what."""

from __future__ import annotations

import itertools
import os

import pytest

from actbench import livememory
from actbench.livememory import REPORT_SECONDS, SAMPLE_SECONDS, LiveReports
from actbench.measuring.bench import measure
from actbench.model.live import HOLDERS, LiveMemory
from actbench.model.records import Case


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_samples_are_apart_and_reports_have_all_since_the_last() -> None:
    told, clock = list[LiveMemory](), Clock()
    reports = LiveReports(told.append, clock)
    for count in range(1, 101):
        reports.look(count, count, list)
        clock.now += SAMPLE_SECONDS / 4

    assert len(told) == round(100 * SAMPLE_SECONDS / 4 / REPORT_SECONDS + 0.5)
    samples = [sample for each in told for sample in each.samples]
    assert all(later - one >= 4 for one, later in itertools.pairwise(samples))
    assert samples[0] == 1


def test_the_peak_is_the_most_so_far_though_each_step_begins_anew() -> None:
    told = list[LiveMemory]()
    reports = LiveReports(told.append)
    reports.report(5, 9, step=1)
    reports.report(4, 7, step=2)

    assert [(each.step, each.phase, each.live_bytes, each.peak_bytes) for each in told] == [
        (1, None, 5, 9),
        (2, None, 4, 9),
    ]


def test_holders_are_the_largest_by_label_and_what_has_none_is_left_out() -> None:
    told = list[LiveMemory]()
    reports = LiveReports(told.append)
    reports.follow(
        where=lambda: (3, "forward"), limit=lambda: 99, label=lambda name: f"line {name % 20}" if name else ""
    )
    reports.report(50, 60, [(name, 2 if name % 20 == 7 else 1) for name in range(100)])

    [report] = told
    assert (report.step, report.phase, report.limit_bytes) == (3, "forward", 99)
    assert report.holders[0] == ("line 7", 10)
    assert len(report.holders) == HOLDERS


def test_a_process_that_the_script_starts_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[LiveMemory]()
    reports = LiveReports(told.append)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    reports.report(1, 1)
    assert told == []
    reports.follow()  # in the process of the run
    reports.report(1, 1)
    assert len(told) == 1


def test_nobody_listens_in_a_trial() -> None:
    assert livememory.listening() is None
    with livememory.report_to(print):
        assert livememory.listening() is not None
        with livememory.report_to(None):
            assert livememory.listening() is None
    assert livememory.listening() is None


def test_a_simulated_case_of_a_sweep_reports_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[LiveMemory]()
    monkeypatch.setattr(livememory, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(livememory, "REPORT_SECONDS", 0.0)
    case = Case(model="tiny-roberta", batch_size=1, sequence_length=8, meter="simulated", device_profile="rtx-4090")
    plainly = measure(case)
    with livememory.report_to(told.append):
        found = measure(case)

    assert found == plainly
    assert {"forward", "backward", "optimizer"} <= {each.phase for each in told}
    assert 0 < told[-1].peak_bytes <= found.peak_bytes
    assert {each.limit_bytes for each in told} == {found.memory_limit_bytes}
