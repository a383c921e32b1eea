"""Columns that a user asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actbench.errors import UsageError
from actbench.model.measured import MeasuredRecord, PeakParts, PhasePeaks
from actbench.report import tables
from actbench.report.render import csv_text, markdown
from actbench.report.render.widths import fitted
from actbench.report.tables.columns import CHOICES, RESULTS, names_in
from actbench.tools.html.html import html_page

MakeRecord = Callable[..., MeasuredRecord]
PARTS = PeakParts(weights_bytes=400, temporary_bytes=600)


def titles(records: list[MeasuredRecord], names: str) -> list[str]:
    return [column.title for column in tables.results_table(records, columns=names_in(names)).columns]


@pytest.fixture
def records(make_record: MakeRecord) -> list[MeasuredRecord]:
    timed = {"meter": "cpu", "step_seconds": (1.0, 2.0, 3.0), "peak_parts": PARTS}
    return [make_record(**timed), make_record("fewbit:3", **timed)]


def test_every_column_has_a_name_of_its_own() -> None:
    shown = [column for column in RESULTS if not column.within]

    assert {CHOICES[column.name].key for column in shown} == {column.key for column in shown}


def test_asked_columns_stand_in_their_order_behind_what_tells_rows_apart(records: list[MeasuredRecord]) -> None:
    found = titles(records, "temporaries,peak, weights")

    assert found == ["Model", "Batch", "Scheme", "Meter", "Temporaries at peak", "Peak", "Weights"]


def test_of_what_tells_rows_apart_some_can_be_chosen(make_record: MakeRecord, records: list[MeasuredRecord]) -> None:
    assert titles(records, "peak,scheme") == ["Scheme", "Peak"]
    assert titles(records, "scheme,machine,peak") == ["Scheme", "Machine", "Peak"]
    several = [make_record(attention=attention) for attention in ("eager", "sdpa")]
    assert titles(several, "scheme,peak") == ["Attention", "Scheme", "Peak"]


def test_the_peak_of_each_phase_is_in_csv_and_shown_where_it_is_asked_for(make_record: MakeRecord) -> None:
    phases = PhasePeaks(forward_bytes=700, backward_bytes=900, optimizer_bytes=800)
    records = [make_record(phase_peaks=phases), make_record("fewbit:3", phase_peaks=phases)]

    asked = tables.results_table(records, columns=names_in("scheme,peak-forward,peak-backward,peak-optimizer"))

    assert [column.key for column in asked.columns if not column.quiet] == [
        *("scheme", "forward_peak_bytes", "backward_peak_bytes", "optimizer_peak_bytes"),
    ]
    assert list(asked.rows[1].values()) == ["fewbit:3", 700, 900, 800]
    assert "forward_peak_bytes,backward_peak_bytes,optimizer_peak_bytes" in csv_text(tables.results_table(records))
    assert "Peak, forward" not in markdown(tables.results_table(records))


def test_a_spread_comes_with_its_value(records: list[MeasuredRecord]) -> None:
    assert titles(records, "scheme,step") == ["Scheme", "Step", "±"]


def test_an_asked_column_stays_where_it_says_nothing_and_where_there_is_no_room(records: list[MeasuredRecord]) -> None:
    table = tables.results_table(records, columns=names_in("scheme,gradients,gradient-error"))

    assert [row["gradients_bytes"] for row in table.rows] == [None, None]
    assert fitted(table, 5).left_out == ()


def test_all_texts_have_the_same_columns(records: list[MeasuredRecord]) -> None:
    [table] = tables.report_tables(records, "T", names_in("scheme,peak,weights"))

    assert "| Scheme | Peak ↓ | Weights ↓ |\n" in markdown(table)
    assert csv_text(table).splitlines()[0] == "scheme,peak_bytes,weights_bytes"
    assert '<th>Scheme</th><th class="number">Peak\xa0↓</th><th class="number">Weights\xa0↓</th></tr>' in html_page(
        [table], "T"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peek", "there is no column 'peek'; did you mean peak"),
        ("Peak", "there is no column 'Peak'; did you mean peak"),
        ("zzz", "there is no column 'zzz'; known: machine, model, batch"),
        ("peak,,saved", "there is no column ''"),
        ("peak,saved,peak", "column 'peak' is given twice"),
    ],
)
def test_a_wrong_name_is_refused_with_the_closest(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        names_in(text)

    assert message in str(refused.value)


def test_the_page_about_columns_names_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs" / "columns.md").read_text()

    assert [name for name in CHOICES if f"`{name}`" not in page] == []
