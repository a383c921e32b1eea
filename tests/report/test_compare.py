from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case
from actbench.report import render
from actbench.report.compare import Comparison, compare, parse_limit

MakeRecord = Callable[..., MeasuredRecord]


def checked(before: list[MeasuredRecord], after: list[MeasuredRecord], *limits: str) -> Comparison:
    return compare(before, after, [parse_limit(text) for text in limits])


def test_quantities_of_both_files_and_their_changes(make_record: MakeRecord) -> None:
    before = make_record(peak_bytes=1000, largest_batch=40, meter="cpu", step_seconds=(0.5,))
    after = make_record(peak_bytes=1100, largest_batch=50, meter="cpu", step_seconds=(1.0,), machine="other")
    table = compare([before], [after]).table
    (row,) = table.rows

    assert (row["peak_bytes_before"], row["peak_bytes_after"]) == (1000, 1100)
    assert row["peak_change"] == pytest.approx(0.1)
    assert (row["samples_per_second_before"], row["samples_per_second_after"]) == (16, 8)
    assert (row["samples_per_second_change"], row["largest_batch_change"]) == (-0.5, 0.25)
    assert row["activation_change"] == 0
    assert table.notes == ("A was measured on box (a processor), B on other (a processor).",)


def test_cases_of_one_file_only_are_shown(make_record: MakeRecord) -> None:
    table = compare([make_record(), make_record("a")], [make_record(), make_record("b")]).table

    assert [(row["scheme"], row["status_before"], row["status_after"]) for row in table.rows] == [
        ("exact", None, None),
        ("a", None, "not in this file"),
        ("b", "not in this file", None),
    ]


def test_cases_are_told_apart_by_all_their_settings(make_record: MakeRecord) -> None:
    before = [make_record(attention=attention) for attention in ("eager", "sdpa")]
    table = compare(before, before).table

    assert [row["attention"] for row in table.rows] == ["eager", "sdpa"]


def test_a_table_of_comparison_renders(make_record: MakeRecord) -> None:
    text = render.markdown(compare([make_record(peak_bytes=1000)], [make_record(peak_bytes=950)]).table)

    assert "| Peak A | Peak B | Peak change ↓ |" in text
    assert "| 1,000 B | 950 B | -5.0 % |" in text


def test_limits_that_hold_are_not_told(make_record: MakeRecord) -> None:
    before = make_record(peak_bytes=1000, largest_batch=40)
    after = make_record(peak_bytes=1050, largest_batch=40)

    assert checked([before], [after], "peak:5%", "largest_batch:0%", "peak:>2KiB").violations == ()


def test_limits_that_break_are_told_with_their_case(make_record: MakeRecord) -> None:
    before = make_record(peak_bytes=1024, largest_batch=40)
    after = make_record(peak_bytes=2048, largest_batch=39)

    assert checked([before], [after], "peak:5%", "largest_batch:0%", "peak:>1KiB").violations == (
        "peak:5%: tiny, exact, batch 8 (simulated): 1.00 KiB before, 2.00 KiB now",
        "largest_batch:0%: tiny, exact, batch 8 (simulated): 40 before, 39 now",
        "peak:>1KiB: tiny, exact, batch 8 (simulated): 1.00 KiB before, 2.00 KiB now",
    )


def test_a_case_that_fails_now_breaks_a_limit(make_record: MakeRecord) -> None:
    found = checked([make_record()], [make_record(failure="too much")], "peak:5%")

    assert found.violations == (
        "peak:5%: tiny, exact, batch 8 (simulated): has a value before, and now: out-of-memory",
    )
    assert found.table.rows[0]["status_after"] == "out-of-memory"


def test_a_case_that_was_not_run_again_breaks_the_limit(make_record: MakeRecord) -> None:
    before = [make_record(), make_record("a")]

    (violation,) = checked(before, [make_record()], "peak:5%").violations

    assert "tiny, a, batch 8" in violation
    assert "missing from the second file" in violation


def test_a_limit_that_nothing_was_held_to_does_not_hold(make_record: MakeRecord) -> None:
    nothing = "cannot be checked: no row has a value"
    estimates = "cannot be checked: these rows are simulated, and estimates are not compared"

    assert checked([], [], "peak:>1GiB").violations == (f"peak:>1GiB: {nothing}",)
    assert checked([make_record()], [make_record()], "throughput:5%").violations == (f"throughput:5%: {estimates}",)
    measured = make_record(meter="cpu")
    assert checked([measured], [measured], "throughput:5%").violations == (f"throughput:5%: {nothing}",)


def test_machines_of_one_set_are_compared_each_with_itself(make_record: MakeRecord) -> None:
    before = [make_record(machine="one", peak_bytes=1000), make_record(machine="two", peak_bytes=2000)]
    after = [make_record(machine="two", peak_bytes=2200), make_record(machine="one", peak_bytes=1000)]
    found = checked(before, after, "peak:5%")

    assert [(row["machine"], row["peak_bytes_before"], row["peak_bytes_after"]) for row in found.table.rows] == [
        ("one", 1000, 1000),
        ("two", 2000, 2200),
    ]
    assert found.violations == ("peak:5%: tiny, exact, batch 8 (simulated, two): 1.95 KiB before, 2.15 KiB now",)


def test_json_has_the_values_of_rows_with_their_cases(make_record: MakeRecord) -> None:
    before, after = make_record("a", peak_bytes=1000), make_record("a", peak_bytes=1100)
    comparison = checked([before], [after], "peak:5%")
    found = json.loads(comparison.as_json())
    [row] = found["rows"]

    assert Case(**row["case"]) == before.case
    assert row["machine"] == "box"
    assert (row["values"]["peak_bytes_before"], row["values"]["peak_bytes_after"]) == (1000, 1100)
    assert row["values"] == dict(comparison.table.rows[0])
    assert (found["violations"], found["schema_version"]) == (list(comparison.violations), 1)
