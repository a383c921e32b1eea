"""What a cluster costs: `benchmarks/cluster_runs.py`; no times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_planned_cases_differ_and_sleep_as_long_as_they_say(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(script.time, "sleep", slept.append)
    plan = script.plan(30, 2000)
    session = script.Session(plan[0].case)

    assert len({entry.case for entry in plan}) == 30
    assert {entry.case.meter for entry in plan} == {"simulated"}
    assert session.memory() == script.ANSWER
    assert session.time(3) is None
    assert slept == [2.0]


def test_rows_of_a_file_that_is_not_there_yet_are_none(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert script.lines(file) == 0
    file.write_text("{}\n{}\n")
    assert script.lines(file) == 2


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
def test_every_task_that_is_handed_over_comes_back(script: Any) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, script.__file__, "schedule", "--cases", "300"]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "300 rows after" in done.stdout
