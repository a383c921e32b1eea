"""A downloaded folder may hold Python files of any name; none of them runs because a command is typed there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ("--sequence-length", "8", "-b", "1")
COMPILING = """
import os
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
import torch
from torch._inductor.async_compile import AsyncCompile
AsyncCompile.wait_pool_ready()
torch.compile(lambda x: (x + 1).relu())(torch.zeros(3))
"""


def actbench(*arguments):
    """Run the installed command, as a user does."""
    script = Path(sys.executable).with_name("actbench")
    return subprocess.run([script, *arguments], capture_output=True, text=True, timeout=300)


TABLES = ("tables", "gelu", "--bits", "3")
MEASURE = ("measure", "tiny-roberta", "-s", "fewbit:3", *SMALL, "--meter", "simulated")


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("arguments", [TABLES, MEASURE], ids=lambda each: each[0])
def test_a_command_runs_no_code_of_the_current_folder_and_leaves_nothing_behind(
    witness, arguments, tmp_path, monkeypatch
):
    temporary, before = tmp_path / "temporary", list(Path.cwd().iterdir())
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # which torch sets as soon as it is imported
    ended = actbench(*arguments)

    assert not witness.exists(), f"{witness.read_text()}.py ran: {ended.stderr}"
    assert ended.returncode == 0, ended.stderr
    assert list(temporary.iterdir()) == []
    assert sorted(Path.cwd().iterdir()) == sorted(before)


VERBS = {
    "sweep": ("sweep", "mine.toml", "-o", "out"),
    "sweep on the CPU": ("sweep", "tiny-roberta", "-s", "randomized:0.5", *SMALL, "--meter", "cpu", "--steps", "1"),
    "convert": ("convert", "tiny-roberta", "-s", "fewbit:3"),
    "train": ("train", "digits", "--steps", "2", "--seeds", "1", "-o", "runs"),
    "schemes": ("schemes",),
    "recipes": ("recipes",),
    "models": ("models",),
    "encodings": ("encodings",),
    "doctor": ("doctor",),
}


@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize("arguments", VERBS.values(), ids=VERBS)
def test_no_verb_runs_code_of_the_current_folder(witness, arguments):
    ended = actbench(*arguments)

    assert not witness.exists(), f"{witness.read_text()}.py ran: {ended.stderr}"
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_compilers_that_a_command_starts_run_no_code_of_the_current_folder(witness):
    safe = os.environ | {"PYTHONSAFEPATH": "1"}  # as the entry point of the command has it
    ended = subprocess.run([sys.executable, "-c", COMPILING], capture_output=True, text=True, timeout=300, env=safe)

    assert not witness.exists(), f"{witness.read_text()}.py ran: {ended.stderr}"
    assert ended.returncode == 0, ended.stderr
