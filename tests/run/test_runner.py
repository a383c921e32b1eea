from __future__ import annotations

import pytest
from fakesweeps import Rows, cases, events, sweep

from actbench.errors import MeasurementError
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.provenance import Published
from actbench.report import store
from actbench.run import member
from actbench.run.experiment import Summary
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned


def test_each_case_becomes_a_record_with_all_that_is_known_of_it(log):
    [case] = cases(log, "exact")
    published = (Published(quantity="peak_saving", value=0.1, setting="here", source="paper"),)
    rows, summary = sweep([Planned(case, None, published)])
    [record] = rows.records
    assert summary == Summary(measured=1)
    assert record.case == case
    assert record.outcome.peak_bytes == 1000 + 10 * 4
    assert record.outcome.step_seconds == (0.25,) * 10
    assert (record.recipe, record.command, record.published) == ("test", "actbench sweep test", published)


FAILURES = {
    "exit:3": ("crash", ["exit code 3", "last words"]),
    "kill": ("crash", ["SIGKILL", "out-of-memory killer"]),
    "segfault": ("crash", ["SIGSEGV"]),
    "quit:bye": ("crash", ["SystemExit: bye"]),
    "bug": ("crash", ["ValueError: a bug"]),
    "oom": ("out-of-memory", ["too much"]),
    "hog": ("out-of-memory", ["MemoryError"]),
    "missing": ("unavailable", ["no such device"]),
}


@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_a_case_that_fails_is_a_row_with_a_reason_and_the_sweep_goes_on(log, meter):
    rows, summary = sweep(cases(log, "exact", *FAILURES, "noisy", meter=meter))
    assert summary == Summary(measured=2, failed=len(FAILURES))
    assert isinstance(rows.outcome("noisy"), Measurement)
    for scheme, (reason, words) in FAILURES.items():
        outcome = rows.outcome(scheme)
        assert (scheme, outcome.reason) == (scheme, reason)
        assert [word for word in words if word not in outcome.message] == []


@pytest.mark.slow
def test_a_case_that_takes_too_long_is_killed_with_its_children(log, assert_no_process_is_left):
    plan = [*cases(log, "hang", meter="simulated"), *cases(log, "hang", "exact+then+hang", "exact")]
    rows, summary = sweep(plan, timeout_seconds=1.5)
    assert summary == Summary(measured=1, failed=3)
    assert rows.outcome("hang").reason == "timeout"
    assert "--timeout 1.5 s" in rows.outcome("hang").message
    assert "its steps were timed" in rows.outcome("exact+then+hang").message
    assert_no_process_is_left(log)


@pytest.mark.slow
def test_time_spent_waiting_for_others_is_not_held_against_a_case(log):
    slow = [f"name:{name}+then+sleep:0.06" for name in "abcdef"]
    _, summary = sweep(cases(log, *slow), timeout_seconds=1.5)  # each works 5 x 0.06 s and waits 25 x 0.06 s
    assert summary == Summary(measured=6)


def test_cases_that_differ_in_the_scheme_only_are_timed_in_rounds(log):
    plan = [*cases(log, "name:a"), *cases(log, "name:d", batch_size=8), *cases(log, "name:b", "name:c")]
    sweep(plan)
    order = [scheme.removeprefix("name:") for scheme in events(log, "time")]
    assert order == ["a", "b", "c"] * 5 + ["d"] * 5
    begun = [scheme.removeprefix("name:") for scheme in events(log, "begin")]
    assert begun == ["a", "b", "c", "d"]


def test_there_are_at_least_min_steps_and_min_seconds(log):
    rows, _ = sweep(cases(log, "exact", min_steps=3, min_seconds=10.0))
    seconds = rows.outcome("exact").step_seconds
    assert sum(seconds) >= 10.0
    assert len(seconds) < 2 * 10.0 / 0.25


def test_a_case_that_dies_while_timed_takes_no_other_with_it(log):
    rows, summary = sweep(cases(log, "exact", "name:x+then+kill", "name:y"))
    assert summary == Summary(measured=2, failed=1)
    assert rows.outcome("name:x+then+kill").reason == "crash"
    assert len(rows.outcome("name:y").step_seconds) == 10


def order_of_rows(plan, log):
    """Run a sweep and return each row's scheme with how many timed rounds had begun when it was stored."""
    stored = []

    class Watched(Rows):
        def append(self, record):
            super().append(record)
            stored.append((record.case.scheme, len(events(log, "time"))))

    sweep(plan, Watched())
    return stored


def test_failures_are_stored_before_what_is_still_timed(log):
    stored = order_of_rows(cases(log, "exact", "missing", "name:b+then+bug"), log)
    assert [scheme for scheme, _ in stored] == ["missing", "name:b+then+bug", "exact"]


def test_a_measured_row_is_stored_once_it_and_the_exact_model_had_their_turns(log):
    plan = [*cases(log, "name:a", "exact", "clockless", "name:b")]
    stored = order_of_rows(plan, log)
    assert [scheme for scheme, _ in stored] == ["exact", "clockless", "name:a", "name:b"]
    for (_, turns), had in zip(stored, [13, 13, 14, 15], strict=True):
        assert turns >= had  # more where the next has begun meanwhile


def test_cases_timed_together_say_so(log):
    rows, _ = sweep([*cases(log, "exact", "name:a"), *cases(log, "name:c", batch_size=8)])
    together = [record.outcome.timing_round for record in rows.records]
    assert together[0] == together[1] != together[2]
    assert None not in together
    assert [record.outcome.exact_step_seconds for record in rows.records] == [None] * 3


def test_a_scheme_added_later_is_timed_beside_exact_which_keeps_its_record(log):
    rows, _ = sweep(cases(log, "exact", "name:a"))
    log.unlink()
    _, summary = sweep(cases(log, "exact", "name:a", "name:later"), rows)
    assert summary == Summary(measured=1, skipped=2)
    assert [record.case.scheme for record in rows.records] == ["exact", "name:a", "name:later"]
    assert events(log, "time") == ["exact", "name:later"] * 5
    outcome = rows.outcome("name:later")
    assert outcome.exact_step_seconds == (0.25,) * 10
    assert outcome.timing_round != rows.outcome("exact").timing_round


def test_a_scheme_whose_exact_model_has_no_record_is_timed_alone(log):
    sweep(cases(log, "name:a"))
    assert events(log, "begin") == ["name:a"]


def test_what_is_done_is_skipped_unless_forced(log):
    rows, _ = sweep(cases(log, "exact", "missing"))
    _, again = sweep(cases(log, "exact", "missing", "name:new"), rows)
    assert again == Summary(measured=1, skipped=2)
    assert events(log, "begin") == ["exact", "missing", "name:new", "exact"]  # exact is timed again beside it
    _, forced = sweep(cases(log, "exact", "missing"), rows, force=True)
    assert forced == Summary(measured=1, failed=1)


class Messages(Progress):
    """The messages of sweeps, and how many cases they planned."""

    def __init__(self):
        self.told = []

    def planned(self, cases, jobs=1, *, more=False):
        self.told.append(len(cases))

    def message(self, text):
        self.told.append(text)


@pytest.mark.slow
def test_what_is_done_is_told_before_anything_starts(log):
    told = Messages()
    rows, _ = sweep(cases(log, "exact"), progress=told)
    sweep(cases(log, "exact", "missing"), rows, progress=told)
    sweep(cases(log, "exact", "missing", "name:new"), rows, progress=told, force=True)
    sweep(cases(log, "exact", "missing", "name:new"), rows, progress=told)
    one, all_three = (
        f"{found} already in results.jsonl (--force runs them again)" for found in ("1 of 2 rows is", "3 of 3 rows are")
    )
    assert told.told == [1, one, 1, 3, all_three, 0]


@pytest.mark.slow
def test_what_was_unavailable_is_tried_again_and_other_failures_are_not(log, tmp_path):
    for begun in (["missing", "oom"], ["missing", "oom", "missing"]):
        with store.Store.opened(tmp_path / "results.jsonl", MeasuredRecord) as results:
            sweep(cases(log, "missing", "oom"), results)
        assert events(log, "begin") == begun


def test_a_case_that_stands_twice_is_measured_once(log):
    _, summary = sweep([*cases(log, "exact"), *cases(log, "exact")])
    assert summary == Summary(measured=1)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("jobs", [1, 3])
def test_simulated_cases_run_as_many_at_a_time_as_there_are_jobs(log, jobs):
    plan = cases(log, *(f"name:{name}+sleep:0.3" for name in range(4)), meter="simulated")
    sweep(plan, jobs=jobs)
    lines = [line.split()[2] for line in log.read_text().splitlines()]
    alive = [lines[:end].count("begin") - lines[:end].count("memory") for end in range(len(lines) + 1)]
    assert max(alive) == jobs


def test_a_model_that_closes_its_output_harms_no_other_case(log):
    plan = cases(log, "sleep:1", "sleep:0.3+mute", meter="simulated")  # the first is alive when the second is forked
    rows, summary = sweep(plan, jobs=2)
    assert summary == Summary(measured=2), rows.records


def test_a_bench_that_cannot_be_imported_is_one_error_that_shows_why(log):
    with pytest.raises(MeasurementError, match="No module named 'nosuchbench'"):
        sweep(cases(log, "exact"), bench="nosuchbench")


def test_an_error_while_storing_ends_the_sweep_and_its_processes(log, assert_no_process_is_left):
    class Full(Rows):
        def append(self, record):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        sweep(cases(log, "exact", *["hang"], "name:b", meter="simulated"), Full(), jobs=2)
    assert_no_process_is_left(log)


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(("counts", "reason"), [((3, 4), "out-of-memory"), ((3, 3), "crash"), ((None, None), "crash")])
def test_a_process_that_was_ended_for_want_of_memory_is_told_from_a_crash(log, monkeypatch, counts, reason):
    kills = iter(counts)
    monkeypatch.setattr(member, "memory_kills", lambda: next(kills))
    rows, _ = sweep(cases(log, "kill"))

    assert rows.outcome("kill").reason == reason
    assert "--retry-failed" in rows.outcome("kill").message


@pytest.mark.slow
def test_failed_cases_are_tried_again_when_asked(log):
    rows, _ = sweep(cases(log, "exact", "bug"))
    again, retried = (sweep(cases(log, "exact", "bug"), rows, retry_failed=asked)[1] for asked in (False, True))

    assert (again, retried) == (Summary(skipped=2), Summary(failed=1, skipped=1))


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("meter", ["simulated", "cpu"])
def test_simulated_steps_that_take_long_are_told_while_the_case_runs(log, meter):
    told = []

    class Told(Progress):
        def noted(self, case, text):
            told.append((case, text))

        def finished(self, case, outcome):
            told.append((case, outcome.kind))

    [case] = cases(log, "long", meter=meter)
    sweep([case], progress=Told())

    (first, text), (second, kind) = told
    assert (first, second, kind) == (case, case, "measured")
    assert text.startswith("a simulated step takes long: 1 operator ran in")
