"""`benchmarks/optimizers.py` on a few parameters: rows, bytes and files; no times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from actbench.methods.formats.ops.smaq.format import SMAQ


@pytest.mark.slow
def test_rows_are_written_with_the_bytes_of_the_state(script, monkeypatch, capsys, tmp_path: Path) -> None:
    options = ["--layers", "0", "--words", "100", "--rounds", "2", "--only", "smaq", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["optimizers.py", *options])
    script.main()

    written = json.loads((tmp_path / "optimizers.json").read_text())
    small = 3 * 768  # two vectors of a norm and an embedding of one row
    assert written["parameters"] == (100 + 514) * 768 + small
    (row,) = written["rows"]
    counters = 4 * 5
    state = 2 * (SMAQ.packed_bytes(100 * 768) + SMAQ.packed_bytes(514 * 768) + 4 * small) + counters
    assert row["state_bytes"] == state / written["parameters"]
    assert (tmp_path / "optimizers.md").read_text() in capsys.readouterr().out


def test_an_optimizer_that_cannot_run_is_a_row_with_the_reason(script, monkeypatch) -> None:
    def broken(parameters):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(script, "optimizers", lambda: {"missing": "pip install it", "broken": broken})
    rows, _ = script.measure(layers=0, words=10, rounds=2, only="")
    assert [row.skipped for row in rows] == ["pip install it", "RuntimeError: no such thing"]
    assert "| broken | | skipped | RuntimeError: no such thing | |" in script.table(rows)
