"""Standard output and standard error that cannot be written."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from actbench.cli.running import Tolerant
from actbench.report import store

COMMAND = Path(sys.executable).with_name("actbench")


def run(*arguments, **settings):
    return subprocess.run([COMMAND, *arguments], stderr=subprocess.PIPE, text=True, timeout=300, **settings)


def test_a_full_disk_behind_standard_output_is_one_message():
    with open("/dev/full", "w") as full:
        ended = run("recipes", stdout=full)

    assert ended.returncode == 2
    assert ended.stderr == "actbench: standard output cannot be written: No space left on device\n"


def test_characters_that_an_encoding_lacks_are_replaced(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ended = run("recipes", stdout=subprocess.PIPE)

    assert ended.returncode == 0, ended.stderr
    assert "quickstart" in ended.stdout


@pytest.mark.exhaustive
def test_a_sweep_goes_on_when_nobody_reads_what_it_says(tmp_path):
    small = ("tiny-roberta", "-s", "fewbit:3", "--sequence-length", "8", "-b", "1,2", "--meter", "simulated")
    process = subprocess.Popen(
        [COMMAND, "sweep", *small, "-o", tmp_path / "rows.jsonl"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    process.stdout.close()

    assert process.wait(300) == 0
    assert len(store.read_results(tmp_path / "rows.jsonl").records) == 4


def test_a_stream_drops_what_follows_its_first_error(tmp_path):
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    with (tmp_path / "file").open("w", buffering=1) as file, full:
        stream, tolerant = Tolerant(file), Tolerant(full)
        assert stream.write("a\n") == 2
        assert [tolerant.write("text"), tolerant.write("more")] == [4, 4]
        tolerant.flush()

        assert tolerant.error is not None
        assert stream.error is None
    assert (tmp_path / "file").read_text() == "a\n"


@pytest.mark.exhaustive
def test_a_closed_stream_is_no_error():
    ended = subprocess.run(f"{COMMAND} schemes >&- 2>&-; echo $?", shell=True, capture_output=True, text=True)

    assert (ended.stdout, ended.stderr) == ("0\n", "")
