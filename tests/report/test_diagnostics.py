from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from actbench.model.measured import Diagnostic, MeasuredRecord, Measurement
from actbench.report import render, store, tables

MakeRecord = Callable[..., MeasuredRecord]
DATA = Path(__file__).parents[1] / "data"
OWN = Diagnostic(name="spent_luck", title="Luck, spent", value=0.25)


def test_what_a_scheme_reports_is_a_column_of_its_own(make_record: MakeRecord, tmp_path: Path) -> None:
    record = make_record("fewbit:3", diagnostics=(OWN,))
    file = tmp_path / "box.jsonl"
    file.write_text(record.model_dump_json() + "\n")
    table = tables.results_table([make_record(), *store.read_results(file).records])

    assert "| Luck, spent |" in render.markdown(table)
    assert [row["spent_luck"] for row in table.rows] == [None, 0.25]


def test_older_records_have_them_as_fields() -> None:
    old = json.loads((DATA / "measured-2026-11.jsonl").read_text().splitlines()[0])["outcome"]
    assert "diagnostics" not in old
    read = Measurement.model_validate_json(json.dumps({**old, "sketch_variance_predicted": 2.5, "sgd_variance": "NaN"}))

    assert read.diagnostic("sketch_variance_predicted") == 2.5
    assert read.diagnostic("sgd_variance") != read.diagnostic("sgd_variance")
    assert read.diagnostic("sketch_variance_observed") == old["sketch_variance_observed"]
    written = json.loads(read.model_dump_json())
    assert "sgd_variance" not in written
    assert Measurement.model_validate_json(read.model_dump_json()).diagnostics[0] == read.diagnostics[0]


def test_a_name_of_a_common_column_is_no_second_column(make_record: MakeRecord) -> None:
    other = Diagnostic(name="peak_bytes", title="Mine", value=1)
    table = tables.results_table([make_record(diagnostics=(other, OWN))])

    assert [column.key for column in table.columns].count("peak_bytes") == 1
    assert table.rows[0]["peak_bytes"] == 1000


@pytest.mark.parametrize(
    "wrong",
    [{"sgd_varianse": 1.0}, {"sgd_variance": "many"}, {"diagnostics": [{"name": "a b", "title": "A", "value": 1}]}],
)
def test_other_fields_and_names_are_refused(make_record: MakeRecord, wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Measurement.model_validate({"weights_bytes": 1, "activation_bytes": 1, "peak_bytes": 1, **wrong})
