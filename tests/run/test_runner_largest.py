"""The largest batch of a case in a sweep, and cases over their limit."""

from __future__ import annotations

import psutil
import pytest
from fakesweeps import Rows, cases, events, sweep

from actbench.measuring import timelines
from actbench.model.records import Case
from actbench.run.experiment import Summary
from actbench.run.progress import Progress
from actbench.run.trials import Trials


def test_the_largest_batch_of_a_real_case_is_predicted_and_then_proved_in_fresh_processes(log):
    rows, _ = sweep(cases(log, "exact", find_largest_batch=True, memory_limit_bytes=1725))
    outcome = rows.outcome("exact")
    found = outcome.largest_batch_search
    assert outcome.largest_batch == found.batch_size == found.predicted == (1725 - 1000) // 10
    assert (found.fits_peak_bytes, found.next_peak_bytes, found.next_outcome) == (1720, 1730, "over-limit")
    assert found.trials == 2
    assert len(events(log, "begin")) == 1 + 1 + 2


def test_what_is_tried_for_the_largest_batch_is_a_trial_and_the_case_itself_is_none(log):
    sweep(cases(log, "exact", find_largest_batch=True, memory_limit_bytes=1725))

    assert len(events(log, "begin")) == 4
    assert len(events(log, "trial")) == 3


def test_a_trial_has_no_timeline():
    case = Case(model="tiny-llama", scheme="exact", sequence_length=8, batch_size=1, meter="cpu")

    assert timelines.Session(case).memory().timeline is not None
    assert timelines.Trial(case).memory().timeline is None


def test_a_largest_batch_that_cannot_be_decided_is_a_warning_and_keeps_the_measurement(log):
    rows, _ = sweep(cases(log, "dies_at:73", find_largest_batch=True, memory_limit_bytes=1725))
    outcome = rows.outcome("dies_at:73")
    assert (outcome.largest_batch, len(outcome.step_seconds)) == (None, 10)
    [warning] = outcome.warnings
    assert "batch 73" in warning
    assert "exit code 7" in warning


def test_the_largest_batch_is_searched_while_no_other_case_is_alive(log, monkeypatch):
    alive = []
    tried = Trials.add_largest_batch

    def watched(self, case, outcome):
        alive.append([process for process in psutil.Process().children(recursive=True) if _is_a_case(process)])
        return tried(self, case, outcome)

    monkeypatch.setattr(Trials, "add_largest_batch", watched)
    sweep(cases(log, "exact", "name:a", find_largest_batch=True, memory_limit_bytes=1725))
    assert alive == [[], []]


def _is_a_case(process):
    return process.parent().ppid() == psutil.Process().pid


def test_a_case_that_is_over_its_limit_is_measured_with_its_largest_batch(log):
    rows, summary = sweep(cases(log, "exact", batch_size=128, find_largest_batch=True, memory_limit_bytes=1725))
    outcome = rows.outcome("exact")
    assert (summary, outcome.peak_bytes, outcome.over_limit_bytes) == (Summary(measured=1), 2280, 2280 - 1725)
    assert outcome.largest_batch == outcome.largest_batch_search.batch_size == 72
    assert len(outcome.step_seconds) == 10


def test_of_a_case_over_its_limit_not_even_one_sample_may_fit(log):
    rows, _ = sweep(cases(log, "peak:2000", batch_size=1, find_largest_batch=True, memory_limit_bytes=1725))
    assert (rows.outcome("peak:2000").largest_batch, rows.outcome("peak:2000").over_limit_bytes) == (0, 275)


def test_a_case_that_is_over_its_limit_is_no_failure_to_retry(log):
    plan, rows = cases(log, "exact", batch_size=128, memory_limit_bytes=1725), Rows()
    assert sweep(plan, rows)[1] == Summary(measured=1)
    assert sweep(plan, rows, retry_failed=True)[1] == Summary(skipped=1)


def test_a_case_that_runs_out_of_memory_stays_failed_and_says_what_would_fit(log):
    plan = cases(log, "strict", batch_size=128, find_largest_batch=True, memory_limit_bytes=1725)
    rows, summary = sweep(plan)
    outcome = rows.outcome("strict")
    assert (summary, outcome.reason) == (Summary(failed=1), "out-of-memory")
    assert outcome.message.endswith("; the largest batch that fits is 72")


def test_a_case_that_does_not_fit_says_why_its_largest_batch_is_unknown(log):
    scheme = "strict+dies_at:72"
    rows, _ = sweep(cases(log, scheme, batch_size=128, find_largest_batch=True, memory_limit_bytes=1725))
    assert rows.outcome(scheme).reason == "out-of-memory"
    assert "the largest batch is unknown: the step at batch 72 ended in crash" in rows.outcome(scheme).message


def test_without_a_limit_the_largest_batch_is_that_of_the_memory_available_now(log, monkeypatch):
    monkeypatch.setattr("actbench.run.local.available_memory_bytes", lambda: 1725)
    rows, _ = sweep(cases(log, "exact", find_largest_batch=True))
    found = rows.outcome("exact").largest_batch_search
    assert (found.batch_size, found.memory_limit_bytes, found.next_outcome) == (72, 1725, "over-limit")


class StopsAtTrial(Progress):
    """Ends the sweep, as Ctrl-C does, after some trials."""

    def __init__(self, after):
        self.left = after

    def tried(self, case, batch_size, fits):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("trials", [1, 3])
def test_a_sweep_that_is_stopped_in_a_search_goes_on_with_the_searches_that_are_left(log, trials):
    plan = cases(log, "exact", "name:a", find_largest_batch=True, memory_limit_bytes=1725)
    with pytest.raises(KeyboardInterrupt):
        sweep(plan, rows := Kept(), progress=StopsAtTrial(trials))
    stored = [record.awaits_search for record in rows.records]
    assert stored == ([True, True] if trials == 1 else [True, True, False])
    measured = {scheme: rows.outcome(scheme).step_seconds for scheme in ("exact", "name:a")}
    timed, tried = len(timings(log)), len(events(log, "trial"))

    _, summary = sweep(plan, rows)

    assert summary == Summary(measured=3 - len(stored) + 1, skipped=len(stored) - 2)
    assert len(timings(log)) == timed
    assert len(events(log, "trial")) - tried == 3 * summary.measured
    for scheme, seconds in measured.items():
        assert rows.outcome(scheme).step_seconds == seconds
        assert rows.outcome(scheme).largest_batch == 72
    assert sweep(plan, rows)[1] == Summary(skipped=2)


@pytest.mark.slow
def test_a_search_that_is_left_needs_as_many_processes_as_its_case(log):
    plan = cases(log, "exact", find_largest_batch=True, memory_limit_bytes=1725)
    with pytest.raises(KeyboardInterrupt):
        sweep(plan, rows := Kept(), progress=StopsAtTrial(1))
    tried = len(events(log, "trial"))

    sweep(plan, rows, needed=lambda case: 2)

    assert len(events(log, "trial")) == tried
    assert rows.outcome("exact").reason == "unavailable"
    assert "trains in 2 processes, and one was started" in rows.outcome("exact").message


@pytest.mark.slow
def test_force_measures_a_case_anew_whose_search_is_left(log):
    plan = cases(log, "exact", find_largest_batch=True, memory_limit_bytes=1725)
    with pytest.raises(KeyboardInterrupt):
        sweep(plan, rows := Kept(), progress=StopsAtTrial(1))
    timed = len(timings(log))
    sweep(plan, rows, force=True)
    assert len(timings(log)) == 2 * timed


def timings(log):
    return [line for line in log.read_text().splitlines() if line.split()[2] == "time"]


class Kept(Rows):
    """Counts as a file does."""

    def done(self, case):
        found = self.find(case)
        return found is not None and not found.awaits_search
