"""Warnings of schemes whose gradient is far from the exact one: from records, and from a probe of one batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case
from actbench.tools.convert.gradienterrors import LARGE, Known, probed, recorded, warning

MakeRecord = Callable[..., MeasuredRecord]


@pytest.fixture
def results(tmp_path: Path, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of records below the current one: two of one case, and others of other cases."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "results" / "mine" / "box.jsonl"
    file.parent.mkdir(parents=True)
    records = [
        make_record("actnn:L3", model="tiny-roberta", gradient_error=0.7).model_copy(update={"recorded_at": "2026-01"}),
        make_record("actnn:L3", model="tiny-roberta", gradient_error=1.6).model_copy(update={"recorded_at": "2026-02"}),
        make_record("actnn:L3", model="org/tiny-roberta-2", gradient_error=9.0),
        make_record("actnn:L2", model="tiny-roberta", gradient_error=8.0),
        make_record("fewbit:3", model="tiny-roberta", gradient_error=0.02),
        make_record("gact:L1", model="tiny-roberta", failure="no room"),
    ]
    file.write_text("".join(record.model_dump_json() + "\n" for record in records) + '{"scheme":"actnn:L3"\n')
    return file


def test_the_latest_record_of_the_case_is_known(results: Path) -> None:
    place = f"measured at batch 8, {results.relative_to(Path.cwd())}"

    assert recorded("tiny-roberta", "actnn:L3") == Known(1.6, place)
    assert recorded("hf:org/tiny-roberta", "fewbit:3") == Known(0.02, place)
    assert recorded("tiny-roberta", "gact:L1") is None
    assert recorded("roberta", "actnn:L3") is None
    assert recorded("", "actnn:L3") is None
    assert recorded("tiny-roberta", "actnn:L3", Path("elsewhere")) is None


def test_a_record_that_cannot_be_read_is_named(results: Path) -> None:
    whole = results.read_text()
    broken = '{"scheme":"actnn:L3","gradient_error":1,"model":"tiny-roberta"'
    results.write_text(whole + broken + "\n" + broken)  # the last line is one that a killed sweep was writing

    with pytest.warns(UserWarning, match=r"mine/box\.jsonl, line 8: ") as warned:
        assert recorded("tiny-roberta", "actnn:L3") is not None
    assert len(warned) == 1


def test_a_large_error_is_one_line() -> None:
    assert warning("s", "m", Known(LARGE / 2, "p")) is None
    assert warning("s", "m", None) is None
    assert warning("s", "m", Known(1.61, "p")) == (
        "s takes the gradient of m far from the exact one: relative error 1.6 (p); train a short while first and look "
        "at the loss, or take a scheme with a smaller error"
    )
    assert warning("s", "m", Known(math.nan, "p")) == "s on m: the gradient is not finite (p)"


@pytest.mark.usefixtures("tasks_here")
def test_a_gradient_that_is_not_finite_is_told(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("actbench.tools.convert.workload.probed", lambda case: Known(math.nan, "here"))
    words = ("convert", "tiny-roberta", "--dry-run", "-b", "2", "--sequence-length", "8", "-s", "fewbit:3", "--probe")
    ended = cli(*words, "--export-json", "-")

    assert ended.status == 0, ended.err
    assert "warning: fewbit:3 on tiny-roberta: the gradient is not finite (one batch of 2" in ended.err
    found = json.loads(ended.out, parse_constant=pytest.fail)
    assert found["gradient_error"] == "NaN"


@pytest.mark.slow
def test_a_probe_has_the_error_that_measure_has() -> None:
    from actbench.measuring.bench import Session

    case = Case(model="tiny-roberta", scheme="actnn:L3", batch_size=2, sequence_length=8)
    found = probed(case)

    assert found is not None
    assert found.error == Session(case.model_copy(update={"meter": "cpu"})).memory().gradient_error
    assert probed(case.model_copy(update={"scheme": "exact"})) is None


@pytest.mark.slow
@pytest.mark.usefixtures("tasks_here", "results")
def test_convert_warns_by_records_and_probes_on_request(cli: Any) -> None:
    words = ("convert", "tiny-roberta", "--dry-run", "-b", "2", "--sequence-length", "8")
    by_records, exact = cli(*words, "-s", "actnn:L3"), cli(*words, "-s", "fewbit:3")
    measured = cli(*words, "-s", "fewbit:3", "--probe")

    assert [by_records.status, exact.status, measured.status] == [0, 0, 0], by_records.err
    (line,) = [line for line in by_records.err.splitlines() if line.startswith("warning: actnn:L3 ")]
    assert "relative error 1.6 (measured at batch 8, results/mine/box.jsonl)" in line
    assert "the gradient" not in exact.err
    (said,) = exact.err.splitlines()[-1:]
    assert said.startswith("built RobertaFor")
    assert said.endswith("; nothing was written (--dry-run)")
    assert "relative error of the gradient: 0." in measured.err
