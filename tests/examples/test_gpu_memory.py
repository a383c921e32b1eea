"""The examples of docs/pytest.md, run by pytest as their readers do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "gpu_memory"


@pytest.mark.slow
def test_examples_fit_and_are_in_one_table(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--gpu-memory", "tests"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "test_lightning.py::test_network_fits       rtx-4060  323.59 MiB",
        "test_own_model.py::test_training_fits[16]  rtx-4060  803.12 MiB",
        "test_own_model.py::test_training_fits[32]  rtx-4060  1.41 GiB  ",
        "test_trainer.py::test_trainer_fits         rtx-4060  438.74 MiB",
    ):
        assert line in done.stdout
        assert line.strip() in (EXAMPLES.parents[1] / "docs" / "pytest.md").read_text()
