"""``actbench train`` under the launchers that users start it with, each a test of its own for the time it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actbench.report.store import read_results
from actbench.tools.train.records import Trained, TrainingRun

RECIPE = """
title = "Which?"
[train]
model = "tiny-gpt2@vocab_size=28,n_embd=16,n_layer=1"
data = "text"
sequence_length = 64
batch_size = 16
steps = 4
optimizer = "adamw"
learning_rate = 1e-3
[[scheme]]
spec = "exact"
[[scheme]]
spec = "randomized:0.5"
[[scheme]]
spec = "gact:L2"
"""
ACCELERATE = ("accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(RECIPE)
    return file


def launched(launcher: tuple[str, ...], recipe: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    output = str(recipe.parent / "out")
    command = [sys.executable, "-m", *launcher, "-m", "actbench", "train", str(recipe), "-o", output, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(recipe.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def runs_below(folder: Path) -> tuple[TrainingRun, ...]:
    (file,) = folder.rglob("*.runs.jsonl")
    return read_results(file, TrainingRun).records


@pytest.mark.exhaustive
def test_accelerate_launch_trains_copies(recipe: Path) -> None:
    pytest.importorskip("accelerate")
    ended = launched((*ACCELERATE, "--multi_gpu"), recipe)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Which?") == 1
    assert ended.stderr.count("3 trained, 0 failed") == 1
    assert "2 processes (ddp)" in ended.stdout
    for run in runs_below(recipe.parent / "out"):
        assert (run.case.processes, run.case.strategy) == (2, "ddp")
        assert isinstance(run.outcome, Trained)
        assert len(run.outcome.rank_peak_bytes) == 2
    assert "0 trained, 0 failed, 3 taken" in launched((*ACCELERATE, "--multi_gpu"), recipe).stderr


@pytest.mark.exhaustive
def test_accelerate_launch_trains_shards_and_says_what_cannot_be(recipe: Path) -> None:
    pytest.importorskip("accelerate")
    ended = launched((*ACCELERATE, "--use_fsdp", "--fsdp_version", "2"), recipe)

    exact, sketched, probing = runs_below(recipe.parent / "out")
    assert exact.case.strategy == "fsdp2"
    assert isinstance(exact.outcome, Trained)
    assert isinstance(sketched.outcome, Trained)
    assert "auto_prec=false" in str(getattr(probing.outcome, "message", None))
    assert (ended.stdout + ended.stderr).count("auto_prec=false") == 1
    assert ended.returncode == 1


@pytest.mark.exhaustive
def test_what_is_wrong_is_told_once(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace('"text"', '"texts"'))
    ended = launched(TORCHRUN, recipe)

    assert ended.returncode == 1  # torchrun's own; actbench leaves with 2
    assert ended.stderr.count("there is no data set 'texts'") == 1
    assert "exitcode  : 2" in ended.stderr
    assert not list((recipe.parent / "out").rglob("*.jsonl"))


@pytest.mark.slow
def test_an_option_that_is_not_followed_is_told_once(recipe: Path) -> None:
    pytest.importorskip("accelerate")
    ended = launched((*ACCELERATE, "--multi_gpu", "--mixed_precision", "bf16"), recipe)

    assert ended.stderr.count('write autocast = "bf16" into the recipe') == 1
