import json
from itertools import count
from types import SimpleNamespace

import pytest

from actbench.methods.formats.encodings import COMPARED, DISTRIBUTIONS, Quality, build

FEW = ("--encoding", "int6", "--encoding", "smaq_simulated", "--distribution", "relu,tiny", "--elements", "4096")


def test_rows_exports_and_notes(cli, tmp_path):
    markdown, csv, as_json = (tmp_path / f"table.{ending}" for ending in ("md", "csv", "json"))
    ended = cli("encodings", *FEW, "-v", "--export-markdown", markdown, "--export-csv", csv, "--export-json", as_json)

    assert ended.status == 0, ended.err
    rows = [Quality.model_validate(row) for row in json.loads(as_json.read_text())]
    assert [(row.encoding, row.distribution) for row in rows] == [
        (name, distribution) for name in ("int:6", "smaq_simulated") for distribution in ("relu", "tiny")
    ]
    heading, first, second = csv.read_text().splitlines()
    assert heading == "encoding,simulated,bits,counted_bits,relu_db,tiny_db"
    assert first == f"int:6,,6.5,,{rows[0].snr_db},{rows[1].snr_db}"
    assert second.startswith("smaq_simulated,True,32.0,6.")
    assert "| int:6 |" in markdown.read_text()
    assert "4,096 numbers, relu (1 of 2) …" in ended.err
    assert "4096 float32 numbers" in ended.out
    assert f"written: {markdown}, {csv}, {as_json}" in ended.err
    assert "bits are as the authors count them" in ended.out


def test_what_is_stored_needs_no_word_about_simulation(cli):
    ended = cli("encodings", "--encoding", "bf16", "--distribution", "normal", "--elements", "64")

    assert ended.status == 0, ended.err
    assert "Simulated" not in ended.out


def test_progress_has_the_time_that_the_rest_may_take(cli, monkeypatch):
    monkeypatch.setattr("actbench.methods.formats.command.time", SimpleNamespace(monotonic=count(0, 7).__next__))
    ended = cli("encodings", "--encoding", "bf16", "--distribution", "relu,tiny,normal", "--elements", "64", "-v")

    assert "64 numbers, relu (1 of 3) …" in ended.err
    assert "64 numbers, tiny (2 of 3, about 14 s left) …" in ended.err
    assert "64 numbers, normal (3 of 3, about 7 s left) …" in ended.err


@pytest.mark.slow
def test_by_default_there_is_one_of_each(cli, tmp_path):
    ended = cli("encodings", "--elements", "64", "--seed", "3", "--export-json", tmp_path / "all.json")

    assert ended.status == 0, ended.err
    rows = json.loads((tmp_path / "all.json").read_text())
    assert [row["encoding"] for row in rows] == [build(spec).spec for spec in COMPARED for _ in DISTRIBUTIONS]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--encoding", "int:9"], "bits=9 must be at most"),
        (["--distribution", "normall"], "--distribution 'normall' is not one of normal"),
        (["--elements", "3"], "--elements"),
    ],
)
def test_what_is_wrong_is_refused(cli, arguments, names):
    ended = cli("encodings", *arguments)

    assert ended.status == 2
    assert names in ended.err
