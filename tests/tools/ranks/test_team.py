from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from actbench.model.measured import Measurement
from actbench.model.records import Failure
from actbench.report import store

ENDINGS = {
    "at:1/kill": ("crash", "rank 1 of 2: the process of the case was killed by SIGKILL"),
    "at:0/exit=3": ("crash", "rank 0 of 2: the process of the case ended by itself with exit code 3"),
    "at:1/bug": ("crash", "rank 1 of 2: ValueError: a bug"),
    "at:1/oom": ("out-of-memory", "rank 1 of 2: too much"),
    "at:0/missing": ("unavailable", "rank 0 of 2: no such device"),
    "at:1/garble": ("crash", "rank 1 of 2: the process of the case sent something else"),
    "at:1/hang": ("timeout", "worked for longer than --timeout 20 s"),
    "at:1/lost+at:0/sleep=0.4+at:0/bug": ("crash", "rank 0 of 2: ValueError: a bug"),
    "name:a+then+at:1/kill": ("crash", "rank 1 of 2: the process of the case was killed by SIGKILL"),
    "name:three": ("unavailable", "name:three trains in 3 processes, and 2 were launched: start 'torchrun --nproc"),
}


def outcomes(folder: Path) -> dict[str, Any]:
    return {record.case.scheme: record.outcome for record in store.read_results(folder / "results.jsonl").records}


def wait_for(folder: Path, words: str) -> None:
    deadline = time.monotonic() + 240
    log = folder / "log"
    while words not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, f"{words} does not come"
        time.sleep(0.05)


@pytest.mark.exhaustive
def test_a_rank_that_fails_is_a_row_with_its_reason_and_the_sweep_goes_on(start, tmp_path, nothing_left) -> None:
    measured = "at:1/peak=5000+at:1/long+then+at:1/sleep=0.01"
    processes = start(json.dumps(["exact", *ENDINGS, measured]))

    assert [process.wait(timeout=500) for process in processes] == [0, 0]
    found = outcomes(tmp_path)
    for scheme, (reason, words) in ENDINGS.items():
        assert isinstance(found[scheme], Failure), scheme
        assert (scheme, found[scheme].reason) == (scheme, reason)
        assert words in found[scheme].message
    assert isinstance(found[measured], Measurement)
    assert found[measured].peak_bytes == 5000
    assert found[measured].rank_peak_bytes == (1000 + 10 * 4, 5000)
    assert len(found[measured].step_seconds) == len(found["exact"].step_seconds) == 10
    assert found["exact"].rank_peak_bytes == ()
    begun = (tmp_path / "log").read_text()
    assert begun.count("exact 4 begin") == 1  # by the first process alone
    assert begun.count(f"{measured} 4 begin") == 2
    nothing_left()


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGINT)])
def test_a_process_that_is_ended_leaves_none_behind(start, tmp_path, nothing_left, rank: int, number: int) -> None:
    processes = start(json.dumps(["name:a", "at:1/hang"]))
    wait_for(tmp_path, "at:1/hang 4 begin")
    time.sleep(0.5)
    processes[rank].send_signal(number)

    for process in processes:
        _, said = process.communicate(timeout=120)
        if process is processes[0] and rank == 1:
            assert "process 1 of 2" in said
            assert "is gone" in said
    nothing_left()


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_sweep_with_its_name(start, tmp_path, nothing_left) -> None:
    first, second = start(json.dumps(["at:0/hang", "name:b"]))
    wait_for(tmp_path, "at:0/hang 4 begin")
    second.send_signal(signal.SIGSTOP)

    _, said = first.communicate(timeout=120)

    assert first.returncode == 1
    assert "process 1 of 2" in said
    assert "does not answer" in said
    assert outcomes(tmp_path)["at:0/hang"].reason == "timeout"
    second.send_signal(signal.SIGCONT)
    assert second.wait(timeout=60) == 0
    nothing_left()
