"""A record of every kind as it was written in November 2026: each reads, and keeps all that it said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from actbench.errors import StoreError
from actbench.model.measured import FIRST_DIAGNOSTICS, Measurement
from actbench.model.records import Failure
from actbench.report import kinds, lines, store
from actbench.tools.train.records import Trained, TrainingRun

DATA = Path(__file__).parents[1] / "data"


LATER = {"workspaces": True, "cache": "dynamic"}
"""Fields that came later, whose value for older records is something."""


def with_nothing_new(old: Any, new: Any) -> bool:
    """Return whether what was read says what was written, with None, False or nothing in every field that came later.

    What schemes report stood in fields of the measurement, and stands among its diagnostics.
    """
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(map(with_nothing_new, old, new))
    if not isinstance(old, dict):
        return bool(old == new)
    if diagnostics := new.get("diagnostics"):
        new = {**new, **dict.fromkeys(FIRST_DIAGNOSTICS), **{each["name"]: each["value"] for each in diagnostics}}
        del new["diagnostics"]
    later = {name: value for name, value in new.items() if name not in old}
    nothing = all(value in (None, False, []) or LATER.get(name) == value for name, value in later.items())
    return nothing and all(with_nothing_new(old[name], new.get(name)) for name in old)


def test_measured_cases() -> None:
    file = DATA / "measured-2026-11.jsonl"
    measured, failed = store.read_results(file).records

    assert [record.case.key() for record in (measured, failed)] == ["0da38fbffe733fbb", "75a02f369a78ec00"]
    assert isinstance(measured.outcome, Measurement)
    assert math.isnan(measured.outcome.gradient_cosine or 0)
    assert isinstance(failed.outcome, Failure)
    for record, line in zip((measured, failed), file.read_text().splitlines(), strict=True):
        assert with_nothing_new(json.loads(line), json.loads(record.model_dump_json()))


def test_training_runs() -> None:
    file = DATA / "trained-2026-11.runs.jsonl"
    trained, failed = store.read_results(file, TrainingRun).records

    assert [run.case.key() for run in (trained, failed)] == ["62a975b9078aa609", "99f336871282cf47"]
    assert isinstance(trained.outcome, Trained)
    assert trained.outcome.score == 0.75
    assert isinstance(failed.outcome, Failure)
    for run, line in zip((trained, failed), file.read_text().splitlines(), strict=True):
        assert with_nothing_new(json.loads(line), json.loads(run.model_dump_json()))


def test_the_kind_of_a_file_is_told_from_one_reading_of_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.strange.jsonl"  # of a kind that nobody reads
    file.write_text('{"schema_version": 1, "x": 1}\n')
    read = []
    monkeypatch.setattr(lines, "from_json", lambda line, **how: read.append(line) or from_json(line, **how))

    with pytest.raises(StoreError, match="holds records of the kind 'strange'"):
        kinds.kind_in([file])

    assert len(read) <= 2
