"""Tables of many rows: what is called for twice as many is twice as much, and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from actbench import tables
from actbench.compare import compare
from actbench.records import Record
from actbench.render import csv_text, html_page, json_text, markdown

MakeRecord = Callable[..., Record]
Made = Callable[[int], list[Record]]


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


def one_group(make_record: MakeRecord, count: int) -> list[Record]:
    """Return schemes of which none beats another: the less memory, the more time."""
    return [
        make_record(
            f"scheme-{place}" if place else "exact", meter="cpu", peak_bytes=10_000 - place, step_seconds=(1.0 + place,)
        )
        for place in range(count)
    ]


def many_estimates(make_record: MakeRecord, count: int) -> list[Record]:
    """Return simulations and measurements of one thing, with other seeds, on other devices."""
    simulated = [make_record(seed=place, device_profile=f"gpu{place}-1") for place in range(count // 2)]
    return [*simulated, *(make_record(meter="cuda", seed=place, gpu=f"GPU{place}") for place in range(count // 2))]


def many_groups(make_record: MakeRecord, count: int) -> list[Record]:
    """Return rows that differ in their settings."""
    return [make_record(model=f"model-{place % 7}", seed=place, sequence_length=place + 1) for place in range(count)]


def many_failures(make_record: MakeRecord, count: int) -> list[Record]:
    """Return rows each of which has a note of its own."""
    return [make_record(f"scheme-{place}", failure=f"needs {place} GiB") for place in range(count)]


MADE = (one_group, many_estimates, many_groups, many_failures)
LAID_OUT: dict[str, Callable[[Sequence[Record]], object]] = {
    "results": tables.results_table,
    "estimates": tables.estimates_table,
    "comparison": lambda records: compare(records, records).table,
    "Markdown": lambda records: markdown(tables.results_table(records)),
    "HTML": lambda records: html_page([tables.results_table(records)], "x"),
    "CSV": lambda records: csv_text(tables.results_table(records)),
    "JSON": json_text,
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lay_out", LAID_OUT.values(), ids=LAID_OUT)
def test_twice_as_many_rows_take_twice_as_many_calls(make_record: MakeRecord, made: Any, lay_out: Any) -> None:
    few, many = made(make_record, 200), made(make_record, 400)
    lay_out(few)

    assert calls(lambda: lay_out(many)) < 2.5 * calls(lambda: lay_out(few))
