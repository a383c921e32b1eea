from __future__ import annotations

import csv
import json

import pytest

from actbench.measuring import bench
from actbench.model.ledger import SavedTensor
from actbench.model.records import Case

pytestmark = pytest.mark.usefixtures("tasks_here")

SIZES = ("-b", "2", "--sequence-length", "16")


@pytest.mark.slow
def test_every_saved_tensor_is_listed_with_totals_by_operator(cli, tmp_path):
    file = tmp_path / "ledger.json"
    flags = ("--ledger", *SIZES, "--device-profile", "cpu", "--export-json", file)
    ended = cli("measure", "tiny-gpt2", "-s", "fewbit:3", *flags)
    [written] = json.loads(file.read_text())

    assert ended.status == 0, ended.err
    case = Case(**written["case"])
    assert (case.scheme, case.batch_size, written["schema_version"]) == ("fewbit:3", 2, 1)
    entries = [SavedTensor(**entry) for entry in written["entries"]]
    assert written["total_bytes"] == sum(entry.kept_bytes for entry in entries)
    assert written["total_bytes"] == bench.Session(case).memory().activation_bytes
    codes = [entry for entry in entries if entry.packed]
    assert [(entry.module, entry.bits) for entry in codes] == [
        ("transformer.h.0.mlp.act", 3.0),
        ("transformer.h.1.mlp.act", 3.0),
    ]
    assert f"of {len(entries)} saved tensors" in ended.out
    assert "StepwiseGradientBackward" in ended.out
    assert "Kept by operator" in ended.out


def test_exports_have_all_rows(cli, tmp_path):
    files = {kind: tmp_path / f"ledger.{kind}" for kind in ("csv", "markdown", "html")}
    flags = [flag for kind, file in files.items() for flag in (f"--export-{kind}", file)]
    ended = cli("measure", "tiny-gpt2", "-s", "exact", "-s", "checkpoint", "--ledger", *SIZES, *flags)
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))

    assert ended.status == 0, ended.err
    assert list(dict.fromkeys(row["scheme"] for row in rows)) == ["exact", "checkpoint"]
    assert sum(row["module"] == "transformer.h.0.ln_1" for row in rows if row["scheme"] == "exact") == 5
    for kind in ("markdown", "html"):
        text = files[kind].read_text()
        assert "Kept for backward by exact on tiny-gpt2, batch 2" in text
        assert "Kept for backward by checkpoint on tiny-gpt2, batch 2" in text
        assert "Kept by operator" in text
    assert "more are not saved but recomputed" in ended.out


def test_without_a_scheme_the_exact_model_is_listed_and_with_one_only_that(cli):
    assert "Kept for backward by exact" in cli("measure", "tiny-gpt2", "--ledger", *SIZES).out
    assert "Kept for backward by exact" not in cli("measure", "tiny-gpt2", "-s", "checkpoint", "--ledger", *SIZES).out


@pytest.mark.parametrize("scheme", ["gact", "smaq,on=activations"])
def test_what_a_scheme_packed_has_no_reason_why_it_was_left(cli, tmp_path, scheme):
    file = tmp_path / "ledger.json"
    ended = cli("measure", "tiny-gpt2", "-s", scheme, "--ledger", *SIZES, "--export-json", file)
    [written] = json.loads(file.read_text())
    entries = [SavedTensor(**entry) for entry in written["entries"]]

    assert ended.status == 0, ended.err
    assert {entry.reason for entry in entries if entry.packed} == {None}
    assert any(entry.packed and entry.operator == "FusedAttentionBackward" for entry in entries)
    assert not any("uint8" in (entry.reason or "") for entry in entries)
    assert not any("batch" in (entry.reason or "") for entry in entries if entry.kept_bytes)


def test_any_meter_will_do(cli):
    out = cli("measure", "tiny-gpt2", "-s", "offload", "--ledger", "-m", "cpu", *SIZES).out

    assert "it is in host memory already" in out


def test_what_measures_or_stores_is_refused_beside_it(cli, tmp_path):
    for flags in (["--output", tmp_path], ["--max-batch"]):
        ended = cli("measure", "tiny-gpt2", "--ledger", *flags)
        assert (ended.status, "--ledger" in ended.err) == (2, True)


@pytest.mark.slow
def test_the_largest_rows_are_listed_and_with_all_those_of_no_bytes_too(cli):
    few = cli("measure", "tiny-gpt2", "--ledger", "--top", "2", *SIZES).out
    every = cli("measure", "tiny-gpt2", "--ledger", "--all", *SIZES).out

    assert few.index("Kept by module") < few.index("Kept by reason") < few.index("Kept for backward by exact")
    assert "--all shows every row" in few
    assert "Not shown" not in every
    assert every.count(" parameter") > few.count(" parameter")
    assert "--ledger" in cli.refused("measure", "tiny-gpt2", "--top", "2", naming="--top: only with --ledger")


def test_what_is_kept_is_told_in_80_columns(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = cli("measure", "tiny-gpt2", "-s", "gact", "--ledger", *SIZES).out

    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_tables_of_several_lengths_are_told_apart(cli, tmp_path):
    file = tmp_path / "ledger.csv"
    out = cli("measure", "tiny-gpt2", "--ledger", "-b", "2", "--sequence-length", "8,16", "--export-csv", file).out

    for length in ("8", "16"):
        assert f"on tiny-gpt2, batch 2, sequence length {length} (" in out
    assert {row["sequence_length"] for row in csv.DictReader(file.read_text().splitlines())} == {"8", "16"}
