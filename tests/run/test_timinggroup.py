from __future__ import annotations

from functools import partial
from itertools import groupby

from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.run.isolated import IsolatedSession
from actbench.run.processes import ForkServer
from actbench.run.progress import Progress
from actbench.run.timinggroup import MEMORY_SHARE, PROCESS_BYTES, TimingGroup


def cases(log, *schemes):
    settings = {"batch_size": 4, "meter": "cpu", "min_steps": 10, "min_seconds": 0.0}
    return [Case(model=str(log), scheme=scheme, **settings) for scheme in schemes]


def events(log, kind):
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split()[0] for line in lines if line.split()[2] == kind]


def measure(group, memory_bytes):
    with ForkServer("fakebench") as server:
        return list(
            TimingGroup(partial(IsolatedSession, server, timeout_seconds=None), memory_bytes, Progress()).measure(group)
        )


def room(step_bytes):
    """Return the memory in which two processes are alive together, if their steps take no more."""
    return (step_bytes + 2 * PROCESS_BYTES) / MEMORY_SHARE


def test_small_steps_do_not_keep_more_processes_alive_than_memory_has_room_for(log):
    measure(cases(log, "peak:1", "peak:2", "peak:3"), memory_bytes=2.5 * PROCESS_BYTES / MEMORY_SHARE)

    order = [scheme for scheme, _ in groupby(events(log, "time"))]
    assert order == [*["peak:1", "peak:2"] * 5, "peak:3"]


def test_cases_too_large_to_be_alive_together_are_timed_one_after_the_other(log):
    group = cases(log, "peak:400", "peak:300", "peak:100")
    outcomes = measure(group, memory_bytes=room(500))
    assert [outcome.peak_bytes for _, outcome in outcomes] == [400, 100, 300]
    order = [scheme for scheme, _ in groupby(events(log, "time"))]
    assert order == [*["peak:400", "peak:100"] * 5, "peak:300"]


def test_a_case_put_off_is_timed_beside_exact_again(log):
    group = cases(log, "exact", "peak:300", "peak:600")
    outcomes = {case.scheme: outcome for case, outcome in measure(group, memory_bytes=room(1700))}
    assert events(log, "time") == ["exact", "peak:300"] * 5 + ["exact", "peak:600"] * 5
    assert outcomes["peak:600"].exact_step_seconds == (0.25,) * 10
    assert outcomes["peak:300"].exact_step_seconds is None


def test_where_exact_does_not_fit_beside_a_case_put_off_it_is_timed_alone(log):
    outcomes = dict(measure(cases(log, "exact", "peak:600"), memory_bytes=room(1600)))
    assert events(log, "begin") == ["exact", "peak:600", "peak:600"]
    rounds = [outcome.timing_round for outcome in outcomes.values()]
    assert rounds[0] != rounds[1]
    assert [outcome.exact_step_seconds for outcome in outcomes.values()] == [None, None]


def test_a_case_that_finds_no_room_beside_others_is_measured_again_alone(log):
    outcomes = measure(cases(log, "exact", "shy", "name:b"), memory_bytes=2**40)
    assert [type(outcome) for _, outcome in outcomes] == [Measurement] * 3
    assert events(log, "begin") == ["exact", "shy", "name:b", "shy", "exact"]
    assert events(log, "time") == ["exact", "name:b"] * 5 + ["exact", "shy"] * 5


def test_a_case_that_dies_beside_others_is_measured_again_alone_and_then_believed(log):
    outcomes = dict(measure(cases(log, "exact", "kill", "bug"), memory_bytes=2**40))
    assert [case.scheme for case, outcome in outcomes.items() if isinstance(outcome, Failure)] == ["bug", "kill"]
    assert events(log, "begin") == ["exact", "kill", "bug", "kill"]


def test_a_case_that_finds_no_room_alone_is_not_measured_again(log):
    outcomes = measure(cases(log, "shy", "exact"), memory_bytes=2**40)
    assert [type(outcome) for _, outcome in outcomes] == [Failure, Measurement]
    assert events(log, "begin") == ["shy", "exact"]
