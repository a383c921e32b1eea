from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from actbench.machine import machine
from actbench.report.store import Store, read_results
from actbench.tools.train.checkpoint import FILE_NAME
from actbench.tools.train.records import Trained, TrainingRun

RECIPE = """
title = "Which?"
[train]
model = "resnet-cifar@depth=8,width=4,channels=1"
data = "digits"
image_size = 8
batch_size = 32
steps = 6
optimizer = "sgd"
learning_rate = 0.1
momentum = 0.9
device = "cpu"
[[scheme]]
spec = "exact"
[[scheme]]
spec = "checkpoint,blocks=ResidualBlock"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(RECIPE)
    return file


def runs_below(folder: Path) -> tuple[TrainingRun, ...]:
    (file,) = folder.rglob("*.runs.jsonl")
    return read_results(file, TrainingRun).records


def test_a_recipe_is_trained_once_and_exported(cli: Any, recipe: Path, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"e.{kind}" for kind in ("md", "csv", "json", "html", "svg")}
    flags = (
        *("--export-markdown", files["md"], "--export-csv", files["csv"], "--export-json", files["json"]),
        *("--export-html", files["html"]),
        *("--export-curves", files["svg"]),
    )
    ended = cli("train", recipe, "-o", tmp_path / "out", *flags)
    again = cli("train", recipe, "-o", tmp_path / "out")

    assert ended.status == 0, ended.err
    assert "ResidualBlock" in ended.out
    assert "2 trained, 0 failed" in ended.err
    assert "0 trained, 0 failed, 2 taken" in again.err
    exact, checkpointed = json.loads(files["json"].read_text())
    assert exact["outcome"]["losses"] == checkpointed["outcome"]["losses"]
    assert files["md"].read_text() == next((tmp_path / "out").rglob("*.md")).read_text()
    assert files["csv"].read_text().startswith("model,data,scheme")
    assert "<h1>Which?</h1>" in files["html"].read_text()
    assert not list((tmp_path / "out").rglob(FILE_NAME))
    assert "<svg" in files["svg"].read_text()


def test_a_scheme_that_cannot_be_applied_is_a_row_with_the_reason(cli: Any, recipe: Path, tmp_path: Path) -> None:
    ended = cli("train", recipe, "-o", tmp_path / "out", "-s", "fewbit:3,functions=gelu", "--steps", 1)

    assert ended.status == 1
    assert (ended.out + ended.err).count("nothing-converted: ") == 1


@pytest.mark.parametrize("name", ["curves.jpeg", "curves"])
def test_curves_of_another_kind_are_refused_before_anything_runs(
    cli: Any, recipe: Path, tmp_path: Path, name: str
) -> None:
    cli.refused("train", recipe, "-o", tmp_path / "out", "--export-curves", tmp_path / name, naming="--export-curves")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("was", "is_now", "told"),
    [
        ("digits", "digitz", "did you mean 'digits'"),
        ("depth=8", "depth=9", "6n + 2"),
        ("channels=1", "channels=1,num_classes=2", "num_classes=10"),
        ('"exact"', '"exakt"', "there is no scheme 'exakt'"),
        ("steps = 6", "step = 6", "did you mean 'steps'"),
    ],
)
def test_a_bad_recipe_is_refused_before_anything_runs(
    cli: Any, recipe: Path, tmp_path: Path, was: str, is_now: str, told: str
) -> None:
    recipe.write_text(RECIPE.replace(was, is_now))
    ended = cli("train", recipe, "-o", tmp_path / "out")

    assert ended.status == 2
    assert told in ended.err
    assert not (tmp_path / "out").exists()  # not even a lock


def test_a_device_that_is_not_there_is_refused_before_anything_runs(
    cli: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = cli("train", recipe, "-o", tmp_path / "out", "--device", "cuda")

    assert ended.status == 2
    assert "--device cuda: torch sees no CUDA device here; use --device cpu" in ended.err
    assert not (tmp_path / "out").exists()


def test_the_help_speaks_of_training(cli: Any) -> None:
    words = " ".join(cli("train", "--help").out.replace("│", " ").split())

    assert "Train again" in words
    assert "Measure again" not in words


def test_two_processes_on_one_file_are_refused(cli: Any, recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    with Store.opened(file, TrainingRun, machine()):
        ended = cli("train", recipe, "-o", file)

    assert ended.status == 2
    assert "another actbench process" in ended.err


def test_an_output_that_is_named_like_a_table_is_refused(cli: Any, recipe: Path, tmp_path: Path) -> None:
    message = cli.refused("train", recipe, "-o", tmp_path / "table.md", naming="name a folder or a .jsonl file")

    assert "table.md" in message
    assert not (tmp_path / "table.md").exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_and_its_curve_is_the_same_bit_for_bit(recipe: Path, tmp_path: Path) -> None:
    # The exact run comes first and is stored; the other one is killed, which must remember what it adapted.
    steps = ["--steps", "60", "-s", "actnn:L3,adapt_interval=7"]
    _train(recipe, tmp_path / "whole", *steps).wait()
    killed = _train(recipe, tmp_path / "killed", *steps, "--checkpoint-seconds", "0")
    folder = tmp_path / "killed"
    while _steps_done(folder, "actnn") < 20:
        assert killed.poll() is None
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert [run.case.scheme for run in runs_below(tmp_path / "killed")] == ["exact"]

    assert _train(recipe, tmp_path / "killed", *steps).wait() == 0

    (_, whole), (_, resumed) = runs_below(tmp_path / "whole"), runs_below(tmp_path / "killed")
    assert isinstance(whole.outcome, Trained)
    assert isinstance(resumed.outcome, Trained)
    assert 20 <= resumed.outcome.resumed_at[0] < 60
    assert len(whole.outcome.losses) == 60
    assert resumed.outcome.losses == whole.outcome.losses
    assert resumed.outcome.evaluations == whole.outcome.evaluations


def _steps_done(folder: Path, scheme: str) -> int:
    """Return the steps of the checkpoint of a scheme's run; 0 for none."""
    with contextlib.suppress(FileNotFoundError):  # that of the run before is removed
        for file in folder.rglob(FILE_NAME):
            progress = json.loads(torch.load(file, weights_only=True)["progress"])
            if progress["case"]["scheme"].startswith(scheme):
                return len(progress["losses"])
    return 0


def _train(recipe: Path, output: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "actbench", "train", str(recipe), "-o", str(output), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
