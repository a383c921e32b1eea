"""``actbench convert`` as it is typed: what it runs of others it runs in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("actbench")
SMALL = ("-s", "fewbit:3", "--sequence-length", "8", "--batch-size", "1")


def convert(*arguments):
    return subprocess.run([COMMAND, "convert", *arguments], capture_output=True, text=True, timeout=300)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.exhaustive
def test_a_model_of_more_layers_than_fit_ends_in_words(tmp_path):
    ended = convert("tiny-bert@num_hidden_layers=100000000", *SMALL, "--memory-limit", "150MiB")

    assert ended.returncode == 2, ended.stderr
    assert "needs more memory than the 150.00 MiB that it may take" in ended.stderr
    assert "--memory-limit" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_conversion_that_takes_too_long_is_stopped(tmp_path):
    ended = convert("tiny-bert@num_hidden_layers=100000000", *SMALL, "--timeout", "2")

    assert ended.returncode == 2, ended.stderr
    assert "longer than --timeout 2 s" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_file_that_ends_its_process_is_an_error(tmp_path):
    (tmp_path / "mine.py").write_text("import os\nos._exit(0)\ndef build(): pass\n")
    ended = convert("mine.py:build", *SMALL)

    assert ended.returncode == 2, ended.stderr
    assert "ended by itself with exit code 0" in ended.stderr


@pytest.mark.slow
def test_a_conversion_is_shown_and_written_under_the_schemes_own_name(tmp_path):
    ended = convert("tiny-roberta", "-s", "fewbit:03", *SMALL[2:], "--export-json", "told.json")

    assert re.search(
        r"^built RobertaForSequenceClassification for sequence-classification; "
        r"written to tiny-roberta-fewbit-3 \([\d.]+ [KM]iB\) in .*s; "
        r"load it with actbench\.load_converted\('tiny-roberta-fewbit-3'\)$",
        ended.stderr,
        re.MULTILINE,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["case"]["scheme"] == "fewbit:3"
    assert "3-bit GELU" in ended.stdout
    assert sorted(os.listdir()) == ["tiny-roberta-fewbit-3", "told.json"]
    assert (tmp_path / "tiny-roberta-fewbit-3" / "actbench.json").exists()
