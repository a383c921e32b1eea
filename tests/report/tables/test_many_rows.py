"""Tables of many rows: what is called for twice as many is twice as much, and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actbench.model.measured import MeasuredRecord
from actbench.report import store, tables
from actbench.report.compare import compare
from actbench.report.render import csv_text, formats, json_text, markdown
from actbench.report.tables.values import Column
from actbench.tools.html.html import html_page

MakeRecord = Callable[..., MeasuredRecord]
Made = Callable[[int], list[MeasuredRecord]]


def calls(function: Callable[[], object]) -> int:
    """Return how many functions, those of C too, are called while one runs."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def one_group(make_record: MakeRecord, count: int) -> list[MeasuredRecord]:
    """Return schemes of which none beats another: the less memory, the more time."""
    return [
        make_record(
            f"scheme-{place}" if place else "exact", meter="cpu", peak_bytes=10_000 - place, step_seconds=(1.0 + place,)
        )
        for place in range(count)
    ]


def many_estimates(make_record: MakeRecord, count: int) -> list[MeasuredRecord]:
    """Return simulations and measurements of one thing, with other seeds, on other devices."""
    simulated = [make_record(seed=place, device_profile=f"gpu{place}-1") for place in range(count // 2)]
    return [*simulated, *(make_record(meter="cuda", seed=place, gpu=f"GPU{place}") for place in range(count // 2))]


def many_groups(make_record: MakeRecord, count: int) -> list[MeasuredRecord]:
    """Return rows that differ in their settings."""
    return [make_record(model=f"model-{place % 7}", seed=place, sequence_length=place + 1) for place in range(count)]


def many_failures(make_record: MakeRecord, count: int) -> list[MeasuredRecord]:
    """Return rows each of which has a note of its own."""
    return [make_record(f"scheme-{place}", failure=f"needs {place} GiB") for place in range(count)]


MADE = (one_group, many_estimates, many_groups, many_failures)
LAID_OUT: dict[str, Callable[[Sequence[MeasuredRecord]], object]] = {
    "results": tables.results_table,
    "estimates": tables.estimates_table,
    "comparison": lambda records: compare(records, records).table,
    "Markdown": lambda records: markdown(tables.results_table(records)),
    "HTML": lambda records: html_page([tables.results_table(records)], "x"),
    "CSV": lambda records: csv_text(tables.results_table(records)),
    "JSON": json_text,
}


PAIRS = [  # each way of laying out many groups, and the results and their page of all else
    *((many_groups, name) for name in LAID_OUT),
    *((made, name) for made in MADE if made is not many_groups for name in ("results", "HTML")),
    (many_estimates, "estimates"),
    (many_failures, "comparison"),
]


@pytest.mark.sampled(fast=5, slow=5)
@pytest.mark.parametrize(("made", "name"), PAIRS)
def test_twice_as_many_rows_take_twice_as_many_calls(make_record: MakeRecord, made: Any, name: str) -> None:
    lay_out = LAID_OUT[name]
    few, many = made(make_record, 200), made(make_record, 400)
    lay_out(few)

    assert calls(lambda: lay_out(many)) < 2.5 * calls(lambda: lay_out(few))


def test_a_text_of_many_rows_is_written_once() -> None:
    columns = [Column(key, key, "text", lambda _: "roberta-base") for key in ("model", "label", "meter")]
    few, many = (tables.fill("Models", columns, range(rows)) for rows in (100, 1000))
    formats.cells(few)

    assert calls(lambda: formats.cells(many)) < calls(lambda: formats.cells(few)) + 300  # of 900 rows more


def test_a_line_is_read_in_few_calls(tmp_path: Path, make_record: MakeRecord) -> None:
    file = tmp_path / "box.jsonl"
    file.write_text("".join(record.model_dump_json() + "\n" for record in many_groups(make_record, 200)))
    store.read_results(file)

    assert calls(lambda: store.read_results(file)) < 43 * 200
