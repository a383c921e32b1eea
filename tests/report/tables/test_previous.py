"""Stacks of schemes, each beside the one that it extends."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from actbench.model.measured import MeasuredRecord
from actbench.report import tables
from actbench.report.tables.values import Value

MakeRecord = Callable[..., MeasuredRecord]
KEYS = ("peak_vs_previous", "step_vs_previous", "gradient_error_vs_previous")


def rows(records: list[MeasuredRecord]) -> dict[Value, Mapping[str, Value]]:
    return {row["scheme"]: row for row in tables.results_table(records).rows}


@pytest.fixture
def stacks(make_record: MakeRecord) -> list[MeasuredRecord]:
    timed = {"meter": "cpu", "timing_round": "a"}
    return [
        make_record(**timed, peak_bytes=1000, step_seconds=(1.0, 1.0)),
        make_record("b", **timed, peak_bytes=800, step_seconds=(1.5, 1.5), gradient_error=0.1),
        make_record("b+a", **timed, peak_bytes=400, step_seconds=(3.0, 3.0), gradient_error=0.25),
        make_record("a+c+b", **timed, peak_bytes=400, step_seconds=(1.5, 1.5), gradient_error=0.25),
    ]


def test_each_stack_is_read_against_the_one_before(stacks: list[MeasuredRecord]) -> None:
    found = rows(stacks)

    assert [found["exact"][key] for key in KEYS] == [None, None, None]
    assert [found["b"][key] for key in KEYS] == [pytest.approx(-0.2), pytest.approx(0.5), pytest.approx(0.1)]
    assert [found["b+a"][key] for key in KEYS] == [pytest.approx(-0.5), pytest.approx(1.0), pytest.approx(0.15)]
    assert [found["a+c+b"][key] for key in KEYS] == [0, pytest.approx(-0.5), 0]


def test_steps_of_two_rounds_are_not_compared(stacks: list[MeasuredRecord]) -> None:
    other = stacks[2].outcome.model_copy(update={"timing_round": "b"})
    found = rows([*stacks[:2], stacks[2].model_copy(update={"outcome": other})])

    assert found["b+a"]["step_vs_previous"] is None
    assert found["b+a"]["peak_vs_previous"] == pytest.approx(-0.5)


@pytest.mark.parametrize(("peak", "change"), [(500, -0.2), (900, -0.5)])
def test_of_two_that_could_be_the_previous_one_the_smaller_is(
    peak: int, change: float, make_record: MakeRecord, stacks: list[MeasuredRecord]
) -> None:
    found = rows([*stacks, make_record("a", meter="cpu", peak_bytes=peak)])

    assert found["b+a"]["peak_vs_previous"] == pytest.approx(change)
    assert found["a"]["peak_vs_previous"] == pytest.approx(peak / 1000 - 1)


def test_schemes_that_do_not_extend_each_other_have_no_such_columns(make_record: MakeRecord) -> None:
    for schemes in (["exact", "a", "b"], ["exact", "a", "b", "a+b"], ["exact", "a+b"]):
        assert not set(KEYS) & {c.key for c in tables.results_table(list(map(make_record, schemes))).columns}


def test_other_batches_are_other_stacks(make_record: MakeRecord) -> None:
    found = tables.results_table([make_record("a", batch_size=1), make_record("a+b", batch_size=2)])

    assert not set(KEYS) & {column.key for column in found.columns}


def test_what_brings_nothing_beside_the_one_before_says_so(make_record: MakeRecord) -> None:
    told = {"peak_phase": "backward"}
    records = [make_record(), make_record("a", **told, peak_bytes=500), make_record("a+b", **told, peak_bytes=500)]

    notes = [note for note in tables.results_table(records).notes if "no lower peak" in note]

    assert [note.partition(": it")[0] for note in notes] == ["a+b: no lower peak compared with a"]
