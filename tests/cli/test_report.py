from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actbench.model.measured import MeasuredRecord

MakeRecord = Callable[..., MeasuredRecord]
ROOT = Path(__file__).parents[2]


def written(file: Path, *records: MeasuredRecord) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(record.model_dump_json() + "\n" for record in records))
    return file


def test_compare_takes_folders_and_files(cli: Any, tmp_path: Path, make_record: MakeRecord) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    written(before / "quickstart" / "box.jsonl", make_record(peak_bytes=1000))
    written(before / "other" / "box.jsonl", make_record("checkpoint", peak_bytes=500))
    file = written(after / "quickstart" / "box.jsonl", make_record(peak_bytes=1100), make_record("checkpoint"))

    for second in (after, file):
        ended = cli("compare", before, second, "--fail-on", "peak:5%", "--export-csv", tmp_path / "table.csv")

        assert ended.status == 1
        assert "peak:5%: tiny, exact, batch 8 (simulated): 1,000 B before, 1.07 KiB now" in ended.err
        assert len((tmp_path / "table.csv").read_text().splitlines()) == 1 + 2


def test_broken_limits_are_errors_of_a_run_and_failures_of_junit(
    cli: Any, tmp_path: Path, make_record: MakeRecord
) -> None:
    before = written(tmp_path / "before.jsonl", make_record(peak_bytes=1000))
    after = written(tmp_path / "after.jsonl", make_record(peak_bytes=1100))
    junit = tmp_path / "memory.xml"
    ended = cli("compare", before, after, "--fail-on", "peak:5%", "--format", "github", "--export-junit", junit)

    told = "tiny, exact, batch 8 (simulated): 1,000 B before, 1.07 KiB now"
    assert ended.status == 1
    assert ended.out.splitlines()[-1] == f"::error title=limit broken%3A peak%3A5%25::{told}"
    assert "limit broken" not in ended.err
    assert 'message="1,000 B before, 1.07 KiB now"' in junit.read_text()
    assert cli("compare", before, after, "--fail-on", "peak:20%", "--export-junit", "-").out.endswith("</testsuites>\n")


@pytest.mark.parametrize("flags", [("--format", "github"), ("--export-junit", "memory.xml")])
def test_without_limits_there_is_nothing_to_tell_of_them(
    cli: Any, tmp_path: Path, make_record: MakeRecord, flags: tuple[str, ...]
) -> None:
    file = written(tmp_path / "before.jsonl", make_record())

    cli.refused("compare", file, file, *flags, naming="give --fail-on too")


def test_an_empty_folder_is_refused(cli: Any, tmp_path: Path) -> None:
    ended = cli("compare", tmp_path, tmp_path)

    assert ended.status == 2
    assert f"{tmp_path} holds no results file" in ended.err


TORN = '{"schema_version":1,"rec'


@pytest.mark.parametrize(("content", "held"), [(TORN, "holds only a half-written line"), ("", "is empty")])
def test_a_file_of_which_nothing_can_be_read_is_refused(
    cli: Any, tmp_path: Path, make_record: MakeRecord, content: str, held: str
) -> None:
    file, other = tmp_path / "rows.jsonl", written(tmp_path / "other.jsonl", make_record())
    file.write_text(content)
    fits = tmp_path / "rows.fit.jsonl"
    fits.write_text(content)

    for command in (["report", file], ["compare", file, other], ["compare", other, file], ["report", fits]):
        ended = cli(*command)

        assert (ended.status, ended.out) == (2, "")
        assert f"{fits if fits in command else file} {held}" in ended.err
        assert "name another results file" in ended.err


def test_rows_before_a_half_written_line_are_read(cli: Any, tmp_path: Path, make_record: MakeRecord) -> None:
    file, torn = written(tmp_path / "rows.jsonl", make_record()), tmp_path / "torn.jsonl"
    torn.write_text(TORN)
    alone = cli("report", file, torn)
    file.write_text(file.read_text() + TORN)

    for ended, path in ((alone, torn), (cli("report", file), file)):
        assert ended.status == 0
        assert "exact" in ended.out
        assert f"{path}: its last line was left half-written" in ended.err


def test_an_export_to_standard_output_stands_there_alone(
    cli: Any, tmp_path: Path, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path / "rows.jsonl", make_record(), make_record("fewbit:3", peak_bytes=500))
    chosen = ("report", file, "--columns", "scheme,peak")

    ended = cli(*chosen, "--export-csv", "-", "--export-markdown", tmp_path / "table.md")

    assert ended.status == 0
    assert ended.out == "scheme,peak_bytes\nexact,1000\nfewbit:3,500\n"
    assert "fewbit:3" in ended.err
    assert "| fewbit:3 | 500 B |" in (tmp_path / "table.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "table.md"]

    twice = cli(*chosen, "--export-csv", "-", "--export-json", "-")
    assert twice.status == 2
    assert "name the same file" in twice.err


def test_chosen_columns_leave_json_whole(cli: Any, tmp_path: Path, make_record: MakeRecord) -> None:
    file = written(tmp_path / "rows.jsonl", make_record())

    ended = cli("report", file, "--columns", "scheme,peak", "--export-json", "-")

    assert json.loads(ended.out)[0]["outcome"]["activation_bytes"] == 600


def test_training_runs_have_a_table_and_curves(cli: Any, tmp_path: Path, make_record: MakeRecord) -> None:
    runs = ROOT / "results" / "accuracy"
    page, rows = tmp_path / "page.html", tmp_path / "rows.csv"

    for named in (runs, next(runs.glob("*.runs.jsonl"))):
        ended = cli("report", named, "--html", page, "--export-csv", rows)

        assert ended.status == 0, ended.err
        assert rows.read_text() == next(runs.glob("*.runs.csv")).read_text()
        assert "Accuracy" in ended.out
        assert "step 3\n" in page.read_text()  # what the pointer shows of an evaluation

    mixed = written(tmp_path / "mixed" / "box.jsonl", make_record())
    cli.refused("report", runs, mixed, naming="results of several kinds have no columns in common")
    cli.refused("report", runs, "--columns", "peak", naming="--columns is for measured cases")
    shutil.copy(next(runs.glob("*.runs.jsonl")), mixed.parent)
    assert "Accuracy" not in cli("report", mixed.parent).out


def test_measured_operators_of_older_versions_are_left_out(cli: Any, tmp_path: Path, make_record: MakeRecord) -> None:
    written(tmp_path / "rows.jsonl", make_record())
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "box.kernels.jsonl").write_text('{"schema_version": 1, "recipe": "kernels"}\n')

    assert "exact" in cli("report", tmp_path).out
    cli.refused("report", tmp_path / "kernels", naming="no installed package brings it")
