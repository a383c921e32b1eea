"""Reports of many rows: `benchmarks/report_rows.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actbench.report import store


def written(script: Any, file: Path, rows: int) -> Path:
    with file.open("w") as out:
        for record in script.records(rows):
            out.write(record.model_dump_json() + "\n")
    return file


def test_the_rows_are_cases_of_their_own(script: Any, tmp_path: Path) -> None:
    records = store.read_results(written(script, tmp_path / "rows.jsonl", 300)).records

    assert len(records) == 300
    assert {record.case.meter for record in records} == set(script.METERS)


def test_a_report_is_timed_and_weighed(script: Any, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    seconds, peak_bytes = script.report(
        written(script, tmp_path / "rows.jsonl", 120), "--export-csv", str(table), cpu_seconds=60
    )

    assert len(table.read_text().splitlines()) == 1 + 120
    assert 0 < seconds <= 60
    assert peak_bytes > table.stat().st_size


@pytest.mark.exhaustive
def test_a_hundred_thousand_rows_take_no_more_than_was_measured(script: Any, tmp_path: Path) -> None:
    file = written(script, tmp_path / "rows.jsonl", 100_000)

    _, peak_bytes = script.report(file, cpu_seconds=60)  # a busy machine counts more than a quiet one

    assert peak_bytes <= 620e6  # 592 MB; decision 47 says why not 500
