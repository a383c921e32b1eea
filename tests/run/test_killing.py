from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from actbench.model.measured import Measurement
from actbench.report import store

HERE = str(Path(__file__).parent)
PROGRAM = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
sys.path[:0] = [{here!r}, {folder!r}]
from actbench.report import store
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case
from actbench.run.runner import run_plan
from actbench.run.recipes.sections import Planned
log = {folder!r} + "/log"
plan = [
    Planned(Case(model=log, scheme=f"name:{{name}}+sleep:0.04", batch_size=batch, meter=meter, min_seconds=0.0))
    for meter, names in (("simulated", "abcdef"), ("cpu", "ab")) for batch in (1, 2, 3) for name in names
]
plan.append(Planned(Case(model=log, scheme={last!r}, batch_size=9, meter="cpu", min_seconds=0.0)))
if {searched!r}:
    settings = dict(meter="cpu", min_seconds=0.0, find_largest_batch=True, memory_limit_bytes=1725)
    names = ("strict", "name:a", "name:b", "name:c")
    plan = [Planned(Case(model=log, scheme=f"{{name}}+sleep:0.04", batch_size=128, **settings)) for name in names]
with store.Store.opened(Path({folder!r}) / "results.jsonl", MeasuredRecord) as results:
    run_plan(plan, results, recipe="test", command="test", jobs=2, bench="fakebench", preload=())
assert "torch" not in sys.modules
"""


def start(folder, last="oom", *, searched=False):
    folder.mkdir(exist_ok=True)
    program = PROGRAM.format(here=HERE, folder=str(folder), last=last, searched=searched)
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


def finish(folder, **settings):
    with start(folder, **settings) as process:
        process.communicate()
    assert process.returncode == 0


def rows_of(folder):
    lines = (folder / "results.jsonl").read_text().splitlines()
    records = store.read_results(folder / "results.jsonl").records
    assert len(records) == len(lines)
    cleared = [record.case.model_copy(update={"model": "log"}) for record in records]
    outcomes = [untied(record.outcome) for record in records]
    return sorted((case.key(), outcome) for case, outcome in zip(cleared, outcomes, strict=True))


def untied(outcome):
    """Return an outcome without the random name of the group it was timed in."""
    return outcome.model_copy(update={"timing_round": None}) if isinstance(outcome, Measurement) else outcome


def wait_for_events(log, count):
    """Wait until so many more things have happened in cases."""
    end = count + log.read_text().count("\n") if log.exists() else count
    deadline = time.monotonic() + 120
    while (log.read_text().count("\n") if log.exists() else 0) < end:
        assert time.monotonic() < deadline, "nothing happens in the cases"
        time.sleep(0.001)


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_sweep_killed_at_random_moments_ends_with_the_rows_of_an_undisturbed_one(
    tmp_path, kills, assert_no_process_is_left
):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    finish(undisturbed)
    moments = random.Random(20)
    for _ in range(kills):
        process = start(killed)
        wait_for_events(killed / "log", moments.randint(0, 5))
        time.sleep(moments.uniform(0, 0.06))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stderr.close()
        assert_no_process_is_left(killed / "log")
    finish(killed)
    assert len(rows_of(killed)) == 3 * (6 + 2) + 1
    assert rows_of(killed) == rows_of(undisturbed)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_a_sweep_killed_in_the_middle_of_its_searches_goes_on_with_those_that_are_left(
    tmp_path, kills, assert_no_process_is_left
):
    """No row is lost, nothing that was measured is measured again, and no search that had ended is repeated."""
    log, moments, known = tmp_path / "log", random.Random(21), {}
    for _ in range(kills):
        process = start(tmp_path, searched=True)
        while "trial" not in (log.read_text() if log.exists() else ""):  # all cases are measured before the first
            time.sleep(0.001)
        wait_for_events(log, moments.randint(1, 6))
        time.sleep(moments.uniform(0, 0.06))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stderr.close()
        assert_no_process_is_left(log)
        stored = by_scheme(tmp_path)
        assert len(stored) == 4
        assert all(stored[scheme] == record for scheme, record in known.items())
        known = {scheme: record for scheme, record in stored.items() if not record.awaits_search}
    finish(tmp_path, searched=True)

    last = by_scheme(tmp_path)
    assert all(last[scheme] == record for scheme, record in known.items())
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2 * 4
    assert not any(record.awaits_search for record in last.values())
    assert {found.outcome.largest_batch for found in last.values() if isinstance(found.outcome, Measurement)} == {72}
    assert last["strict+sleep:0.04"].outcome.message.endswith("; the largest batch that fits is 72")
    begun = log.read_text()
    assert [begun.count(f"{scheme} 128 begin") for scheme in last] == [1, 1, 1, 1]


def by_scheme(folder):
    return {record.case.scheme: record for record in store.read_results(folder / "results.jsonl").records}


@pytest.mark.parametrize("last", [pytest.param("hang", marks=pytest.mark.slow), "exact+then+hang"])
def test_a_sweep_killed_while_a_case_has_children_leaves_no_process(tmp_path, last, assert_no_process_is_left):
    process = start(tmp_path / "sweep", last)
    log = tmp_path / "sweep" / "log"
    while f"{last} 9 begin" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()
    process.communicate()
    assert_no_process_is_left(log)


def test_signals_while_the_fork_server_ends_do_not_keep_it_from_killing_what_it_started(
    tmp_path, assert_no_process_is_left
):
    process = start(tmp_path / "sweep", "hang")
    log = tmp_path / "sweep" / "log"
    while "hang 9 begin" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.01)
    time.sleep(0.2)
    (server,) = psutil.Process(process.pid).children()
    process.kill()
    with suppress(psutil.NoSuchProcess):
        while server.status() != psutil.STATUS_ZOMBIE:
            server.terminate()
    process.communicate()
    assert_no_process_is_left(log)


def test_ctrl_c_keeps_the_rows_and_leaves_no_process(tmp_path, assert_no_process_is_left):
    process = start(tmp_path / "sweep", "hang")
    results = tmp_path / "sweep" / "results.jsonl"
    while not results.exists() or results.read_text().count("\n") < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in error
    assert_no_process_is_left(tmp_path / "sweep" / "log")
    assert 2 <= len(rows_of(tmp_path / "sweep")) < 25  # the third may have been on its way to the disk
