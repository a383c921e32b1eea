"""``actbench run`` runs a script that has a stored row once it has changed, and a stored failure when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakescript import TRAIN


@pytest.mark.slow
def test_a_stored_row_is_run_again_once_the_script_has_changed(cli: Any, train: Path) -> None:
    command = ("run", "-o", "out.jsonl", "train.py")
    first, second = cli(*command), cli(*command)
    train.write_text(f"{TRAIN}PEAK_GIB = 20\n")
    third, other = cli(*command), cli(*command, "--lr", "3")
    (train.parent / "blk.py").write_text("WIDTH = 2")
    beside = cli(*command)
    train.write_text(f"{TRAIN}import blk")
    imported = cli(*command)
    (train.parent / "blk.py").write_text("WIDTH = 3")
    fourth, fifth = cli(*command), cli(*command)

    assert "epoch 1" in first.out
    assert "epoch 1" not in second.out
    assert "12.00 GiB" in second.out
    assert "0 measured, 0 failed, 1 taken from the results file" in second.err
    assert "20.00 GiB" in third.out
    assert "epoch 1 ['--lr', '3']" in other.out
    assert ["epoch 1" in each.out for each in (beside, imported, fourth, fifth)] == [False, True, True, False]
    assert "epoch 1" in cli("run", "--force", *command[1:]).out


def test_a_stored_failure_is_run_again_when_asked(cli: Any, train: Path) -> None:
    train.write_text("from pathlib import Path\nPath('data').read_text()\n")
    command = ("run", "-o", "out.jsonl", "train.py")
    failed = cli(*command)
    Path("data").write_text("1")

    assert "No such file" in failed.out
    assert cli(*command).status == 1
    assert cli("run", "--retry-failed", *command[1:]).status == 0
