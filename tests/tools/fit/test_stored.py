"""A ``fit`` whose command was answered before: nothing is started, and torch is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fitcommand import AMONG, STEP
from withouttorch import NOTHING_STARTED

WORDS = (*STEP, *AMONG, "--memory-limit", "6GiB")
SAID = "nothing was simulated: "


def without_torch(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NOTHING_STARTED, *map(str, words)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_an_answer_is_shown_again_without_torch(cli, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    exports = ("--export-json", tmp_path / "j", "--export-csv", tmp_path / "c", "--export-markdown", tmp_path / "m")
    words = (*WORDS, "-o", tmp_path / "kept", *exports)
    first = cli(*words)
    written = [file.read_bytes() for file in exports[1::2]]
    for file in exports[1::2]:
        file.unlink()

    again = without_torch(*words)

    assert (first.status, again.returncode) == (0, 0), again.stderr
    assert again.stdout == first.out
    assert SAID in again.stderr
    assert [file.read_bytes() for file in exports[1::2]] == written


def test_an_answer_that_nothing_fits_is_one_too(cli, log, tmp_path) -> None:
    words = (*STEP, *AMONG, "--exact", "--memory-limit", "512MiB", "-o", tmp_path)
    first = cli(*words)

    again = without_torch(*words)

    assert (first.status, again.returncode) == (1, 1)
    assert first.err.splitlines()[-1].startswith("Nothing fits in 512.00 MiB")
    assert again.stderr.splitlines()[-1] == first.err.splitlines()[-1]


def test_what_is_asked_otherwise_is_not_answered(cli, log, tmp_path) -> None:
    words = (*WORDS, "-o", tmp_path / "one.jsonl")
    cli(*words)
    lines = log.read_text()

    assert SAID not in cli(*words, "--exact").err  # which adds no simulation, but other plans
    assert SAID not in cli(*words, "--code", "2").err
    assert SAID in cli(*words).err  # other commands added rows
    assert log.read_text().startswith(lines)
    (tmp_path / "one.jsonl").unlink()
    assert SAID not in cli(*words).err  # its rows are gone


@pytest.mark.parametrize("question", ["--longest-sequence", "--which-card"])
@pytest.mark.slow
def test_other_questions_are_stored_too(cli, log, tmp_path, question) -> None:
    words = (*WORDS[:-2], question, "-o", tmp_path)
    first = cli(*words)

    again = cli(*words)

    assert (again.status, again.out) == (first.status, first.out)
    assert SAID in again.err


def test_an_answer_of_crashed_simulations_is_not_kept(cli, log, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAKEFIT_CRASHED", "gact")
    cli(*WORDS, "-o", tmp_path)
    monkeypatch.delenv("FAKEFIT_CRASHED")

    again = cli(*WORDS, "-o", tmp_path)

    assert SAID not in again.err
    assert "crashed" not in again.out


@pytest.mark.slow
def test_an_answer_that_the_time_cut_short_is_not_kept(cli, log, tmp_path, clock) -> None:
    clock.left = 3
    cli(*WORDS, "-j", "1", "-o", tmp_path)

    assert SAID not in cli(*WORDS, "-j", "1", "-o", tmp_path).err


@pytest.mark.slow
def test_a_model_of_a_file_that_was_changed_is_simulated_again(cli, log, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(8, 8)\n")
    words = ("fit", f"{file}:build", *STEP[2:4], *AMONG[:2], "-o", Path(tmp_path) / "kept")
    cli(*words)
    assert SAID in cli(*words).err
    file.write_text(file.read_text() + "# changed\n")

    assert SAID not in cli(*words).err
