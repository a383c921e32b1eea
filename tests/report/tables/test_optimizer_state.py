from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from actbench.model.measured import MeasuredRecord
from actbench.report import render, tables
from actbench.report.render import screen
from actbench.tools.html import html as page

MakeRecord = Callable[..., MeasuredRecord]
EXACT, PACKED = 8_000, 1_625


def shown(*records: MeasuredRecord) -> bool:
    """Return whether people are shown the bytes, having seen that CSV and frames have them in any case."""
    table = tables.results_table(records)
    assert "optimizer_bytes" in render.csv_text(table).splitlines()[0].split(",")
    assert "optimizer_bytes" in table.frame.columns
    texts = (render.markdown(table), page.html_page([table], "x"), on_screen(table))
    found = {"Optimizer" in text for text in texts}
    assert len(found) == 1
    return found.pop()


def on_screen(table: tables.Table) -> str:
    console = Console(width=400, force_terminal=True, no_color=True, record=True, file=io.StringIO())
    screen.show(table, console)
    return console.export_text()


def test_it_is_shown_where_a_scheme_has_other_bytes_than_exact(make_record: MakeRecord) -> None:
    exact, packed = make_record(optimizer_bytes=EXACT), make_record("smaq", optimizer_bytes=PACKED)

    assert shown(exact, packed)
    assert "| 7.81 KiB |" in render.markdown(tables.results_table([exact, packed]))


def test_it_is_left_out_where_all_rows_of_a_model_have_the_same(make_record: MakeRecord) -> None:
    small = [make_record(scheme, optimizer_bytes=EXACT) for scheme in ("exact", "fewbit:3")]
    large = make_record(model="large", optimizer_bytes=2 * EXACT)
    failed = make_record("offload", failure="does not fit")

    assert not shown(*small, large, failed)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_it_is_shown_where_the_optimizer_is_not_the_usual_one(make_record: MakeRecord, optimizer: str) -> None:
    assert shown(make_record(optimizer=optimizer, optimizer_bytes=0))


def test_what_is_left_out_is_not_said_to_lack_room(make_record: MakeRecord) -> None:
    table = tables.results_table([make_record(optimizer_bytes=EXACT, reserved_bytes=9_000)])
    console = Console(width=40, force_terminal=True, no_color=True, record=True, file=io.StringIO())
    screen.show(table, console)
    text = console.export_text()

    assert "for lack of space" in " ".join(text.split())
    assert "Optimizer" not in text


def test_records_that_know_nothing_of_it_show_a_dash(make_record: MakeRecord) -> None:
    written = make_record("checkpoint").model_dump(mode="json")
    del written["outcome"]["optimizer_bytes"]
    old = MeasuredRecord.model_validate(written)
    records = [make_record(optimizer_bytes=EXACT), make_record("smaq", optimizer_bytes=PACKED), old]
    (row,) = (row for row in render.markdown(tables.results_table(records)).splitlines() if "checkpoint" in row)

    assert row.split(" | ")[-1] == "– |"
