"""Training runs that are all stored: nothing is started, and torch is not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from withouttorch import NOTHING_STARTED

from actbench.run.progress import Progress
from actbench.tools.train import comparison
from actbench.tools.train.recipe import TrainingRecipe
from actbench.tools.train.tables import stored_runs

RECIPE = """
title = "Which is stored?"
[train]
model = "resnet-cifar@depth=8,width=4,channels=1"
data = "digits"
image_size = 8
batch_size = 32
steps = 2
optimizer = "sgd"
learning_rate = 0.1
device = "cpu"
[[scheme]]
spec = "fewbit:2,functions=relu"
"""


@pytest.fixture
def trained(tmp_path: Path) -> TrainingRecipe:
    file = tmp_path / "mine.toml"
    file.write_text(RECIPE)
    recipe = TrainingRecipe.load(file)
    comparison.run(recipe, tmp_path, command="actbench train")
    return recipe


def test_runs_that_are_stored_are_shown_without_torch(trained: TrainingRecipe, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOTHING_STARTED, "train", tmp_path / "mine.toml", "-o", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert ended.returncode == 0, ended.stderr
    assert "0 trained, 0 failed, 2 taken from the results file" in ended.stderr
    assert "Which is stored?" in ended.stdout


def test_a_run_that_is_left_is_trained(trained: TrainingRecipe, tmp_path: Path) -> None:
    found = stored_runs(trained, tmp_path, Progress())
    assert found is not None
    assert found.summary.skipped == 2
    for change in ({"steps": 3}, {"seeds": "0-1"}):
        assert stored_runs(trained.with_flags(change), tmp_path, Progress()) is None
    assert stored_runs(trained.with_flags({}, ["checkpoint"]), tmp_path, Progress()) is None
    assert stored_runs(trained, tmp_path / "nowhere", Progress()) is None
