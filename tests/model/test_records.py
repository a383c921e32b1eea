from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from actbench.errors import UsageError
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Case


def test_equal_cases_have_equal_keys_and_any_field_changes_the_key() -> None:
    case = Case(model="tiny", batch_size=8)
    others = [
        case.model_copy(update=change)
        for change in (
            {"model": "other"},
            {"batch_size": 9},
            {"scheme": "fewbit:3"},
            {"meter": "cpu"},
            {"seed": 1},
            {"find_largest_batch": True},
            {"memory_limit_bytes": 16 * 1024**3},
            {"min_seconds": 2.0},
        )
    ]

    assert case.key() == Case(model="tiny", batch_size=8).key()
    assert len({case.key(), *(other.key() for other in others)}) == 1 + len(others)


def test_a_record_reads_back_as_it_was(make_record: Callable[..., MeasuredRecord]) -> None:
    record = make_record("fewbit:3", step_seconds=(0.1, 0.2), label="three bits", gradient_error=0.25)

    assert MeasuredRecord.model_validate_json(record.model_dump_json()) == record


def test_nan_is_not_mistaken_for_unknown(make_record: Callable[..., MeasuredRecord]) -> None:
    line = make_record(gradient_error=math.nan, loss=math.inf).model_dump_json()
    outcome = MeasuredRecord.model_validate_json(line).outcome

    json.loads(line, parse_constant=pytest.fail)  # NaN as a bare word is not JSON
    assert isinstance(outcome, Measurement)
    assert math.isnan(outcome.gradient_error or 0)
    assert outcome.loss == math.inf


def test_a_record_begins_with_its_schema_version(make_record: Callable[..., MeasuredRecord]) -> None:
    assert make_record().model_dump_json().startswith('{"schema_version":1,')


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 0}, {"batch_size": -1}, {"seed": -1}, {"extra": 1}, {"min_seconds": math.nan}],
)
def test_a_case_refuses_what_cannot_be_measured(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Case.model_validate({"model": "tiny", "batch_size": 8} | change)


@pytest.mark.parametrize(
    ("model", "dtype", "optimizer"),
    [
        ("tiny", "float32", "adamw"),
        ("hf:me/tiny", None, "adamw"),
        ("mine.py:build", None, None),
    ],
)
def test_a_case_names_the_type_and_optimizer_that_its_model_does_not_bring(
    model: str, dtype: str | None, optimizer: str | None
) -> None:
    for left_open in ({}, {"dtype": None, "optimizer": None}):
        fields = {"model": model, "batch_size": 8, **left_open}
        for case in (Case(**fields), Case.model_validate_json(json.dumps(fields))):  # type: ignore[arg-type]
            assert (case.dtype, case.optimizer) == (dtype, optimizer)
            assert case.key() == Case(**{**fields, "dtype": dtype, "optimizer": optimizer}).key()  # type: ignore[arg-type]

    named = Case.model_validate({**fields, "dtype": "bfloat16", "optimizer": "sgd"})
    assert (named.dtype, named.optimizer) == ("bfloat16", "sgd")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "Case: batch_size: is missing"),
        ({"batch_size": 0}, "Case: batch_size: 0 must be greater than 0"),
        ({"batch_size": "x"}, "Case: batch_size: 'x' must be a valid integer"),
        ({"batch_size": 1, "batchsize": 1}, "Case: batchsize: unknown key; did you mean 'batch_size'?"),
        ({"batch_size": 1, "optimizer": "adm"}, "Case: optimizer: 'adm' is not one of 'adamw'"),
        ({"batch_size": 0, "seed": -1}, "Case: batch_size: 0 must be greater than 0; seed: -1 must be at least 0"),
        ({"batch_size": 1, "script": {"target": "a.py", "step": 1}}, "Case: script.step: unknown key; did you mean"),
    ],
)
def test_a_wrong_case_is_refused_in_words(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Case(model="gpt2", **given)

    assert str(refused.value).startswith(said)
    assert "pydantic" not in str(refused.value)


def test_lines_of_files_are_read_without_the_words_for_users() -> None:
    """Whoever reads a file says which line is wrong, and pydantic reads slowly by way of an ``__init__``."""
    assert not Case.__pydantic_custom_init__
    with pytest.raises(ValidationError):
        Case.model_validate_json('{"model": "gpt2", "batch_size": 0}')
