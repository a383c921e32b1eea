"""`benchmarks/host.py` on a few rounds: rows, operators and files; no times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*options: str) -> str:
    """Run in a process of its own: the script replaces CuPy and parts of torch for the rest of its process."""
    command = [sys.executable, str(ROOT / "benchmarks" / "host.py"), "--rounds", "2", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_labels_stand_one_below_the_other(tmp_path: Path) -> None:
    run("--case", "relu", "launch of a kernel", "--output", str(tmp_path), "--label", "before")
    shown = run("--case", "relu", "--output", str(tmp_path), "--label", "after")

    written = json.loads((tmp_path / "host.json").read_text())
    assert list(written) == ["before", "after"]
    relu, launch = written["before"]["rows"]
    assert relu["own_operators"] == 2
    assert launch["forward_us"] > 0
    table = (tmp_path / "host.md").read_text()
    assert table.endswith(shown.rstrip("\n") + "\n")
    assert table.index("| before |") < table.index("| after |")


def test_operators_are_counted_by_namespace(script) -> None:
    case = script.CASES["relu"]

    counted = script.operators_of(script.subject_of(case, convert=True))

    assert counted.own == 2 * case.layers
