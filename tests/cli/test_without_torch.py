"""Tables of stored results, lists and help need neither torch nor what is installed for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from withouttorch import NOTHING_STARTED

RESULTS = str(Path(__file__).parents[2] / "results" / "quickstart")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", NOTHING_STARTED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("--help",), "measure"),
        (("schemes",), "hyclora"),
        (("schemes", "fewbit"), "Kept for backward"),
        (("report", RESULTS), "roberta-base"),
        (("compare", RESULTS, RESULTS), "+0.0 %"),
    ],
)
def test_a_command_works_without_torch(command: tuple[str, ...], words: str) -> None:
    ended = run(*command)
    assert ended.returncode == 0, ended.stderr
    assert words in ended.stdout
    assert "is left out" not in ended.stderr


def test_a_command_that_needs_torch_says_so_in_a_line() -> None:
    ended = run("models")
    assert ended.returncode == 2
    assert ended.stderr == "actbench: this command needs torch, which is not installed: pip install torch\n"


def test_a_wrong_name_of_a_scheme_has_a_near_one() -> None:
    ended = run("schemes", "fewbot")
    assert ended.returncode == 2
    assert "did you mean 'fewbit'?" in ended.stderr
