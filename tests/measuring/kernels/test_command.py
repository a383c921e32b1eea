"""The verb kernels: exports, results that are stored as they come, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actbench.measuring.kernels import measure
from actbench.results import store
from actbench.results.kernels import KernelRecord, KernelTimes

FEW = ("--op", "relu_mask,pack_codes", "--size", "8x64", "--seconds", "0", "--device", "cpu")


def stored(file: Path) -> list[str]:
    return [record.case.operator for record in store.read(file, KernelRecord).records]


def test_exports_and_output(cli: Any, tmp_path: Path) -> None:
    markdown, csv, exported = (tmp_path / f"table.{ending}" for ending in ("md", "csv", "json"))
    files = ("--export-markdown", markdown, "--export-csv", csv, "--export-json", exported)
    ended = cli("kernels", *FEW, *files, "-o", tmp_path / "out")

    assert ended.status == 0, ended.err
    assert "relu_mask" in ended.out
    assert "| relu_mask |" in markdown.read_text()
    assert csv.read_text().startswith("operator,dtype,bits,size,seconds,")
    (written,) = (tmp_path / "out" / "kernels").glob("*.kernels.jsonl")
    assert stored(written) == ["relu_mask", "pack_codes"]
    records = [KernelRecord.model_validate(record) for record in json.loads(exported.read_text())]
    assert tuple(records) == store.read(written, KernelRecord).records
    assert written.with_suffix(".md").read_text() == markdown.read_text()
    assert written.with_suffix(".csv").read_text() == csv.read_text()
    assert cli("report", tmp_path / "out", "--title", "Operators", "--export-markdown", "-").out == markdown.read_text()


def test_what_was_measured_is_not_measured_again(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    assert cli("kernels", *FEW[2:], "--op", "pack_codes", "-o", file).status == 0
    first = store.read(file, KernelRecord).records
    ended = cli("kernels", *FEW, "-o", file)

    assert "1 measured, 0 failed, 1 taken from the results file" in ended.err
    assert stored(file) == ["pack_codes", "relu_mask"]
    assert "relu_mask" in cli("report", file).out  # its name does not say what it holds
    assert store.read(file, KernelRecord).records[:1] == first
    assert cli("kernels", *FEW, "-o", file, "--force").status == 0
    assert len(file.read_text().splitlines()) == 4


def test_one_that_fails_is_a_row_and_the_others_are_measured(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(place: object) -> None:
        raise MemoryError

    monkeypatch.setitem(measure.SUBJECTS, "relu_mask", broken)
    ended = cli("kernels", *FEW, "-o", tmp_path / "mine.jsonl")

    assert ended.status == 1
    assert "8x64 does not fit in the memory of cpu; give a smaller --size" in " ".join(ended.out.split())
    failed, measured = (record.outcome for record in store.read(tmp_path / "mine.jsonl", KernelRecord).records)
    assert failed.kind == "failed"
    assert failed.reason == "out-of-memory"
    assert isinstance(measured, KernelTimes)


def test_a_wrong_name_ends_with_2_and_one_message(cli: Any) -> None:
    message = cli.refused("kernels", "--op", "relu_mas", naming="--op 'relu_mas' is not one of")

    assert "did you mean 'relu_mask'?" in message
