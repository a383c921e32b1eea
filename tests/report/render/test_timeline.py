"""The memory over a step as a table, a line of text, a chart and a picture."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from actbench.errors import UsageError
from actbench.model.measured import MeasuredRecord
from actbench.model.timeline import OTHER, Holder, Span, Timeline
from actbench.report.exporting import Exported
from actbench.report.render.screen import NARROWEST, WIDEST, sparkline
from actbench.report.tables import report_tables
from actbench.report.tables.entries import join
from actbench.report.tables.step import LARGEST, holders_table
from actbench.tools.html import export, measured
from actbench.tools.html.charts import below_each_other
from actbench.tools.html.export import HTML
from actbench.tools.html.html import html_page
from actbench.tools.html.pictures import memory_over_steps
from actbench.units import MIB

MakeRecord = Callable[..., MeasuredRecord]
WITH_CHARTS = pytest.mark.skipif(importlib.util.find_spec("vl_convert") is None, reason="no vl-convert-python")
SAVED = tuple(MIB * amount for amount in (0, 10, 20, 30, 20, 10, 0, 0))


def made(*, peak: int = 34 * MIB, others: int = 0, module: str = "layer.0", host: bool = False) -> Timeline:
    """Eight moments; the peak is the fourth, of weights (4 MiB), what two operators save, and ``others`` of 1 MiB."""
    holders = [
        Holder(module=module, kind="saved", operator="aten::mm", tensors=2, held_bytes=20 * MIB - others * MIB),
        Holder(module="layer.1", kind="saved", operator="aten::gelu", tensors=1, held_bytes=10 * MIB),
        Holder(module="", kind="weights", operator="parameter", tensors=1, held_bytes=4 * MIB),
        *(
            Holder(module=f"tail.{n}", kind="saved", operator="aten::add", tensors=1, held_bytes=MIB)
            for n in range(others)
        ),
    ]
    return Timeline(
        peak_bytes=peak,
        peak_event=30,
        events=70,
        moments=tuple(range(0, 80, 10)),
        held_bytes={"weights": (4 * MIB,) * 8, "saved": SAVED, **({"host": (0, MIB) * 4} if host else {})},
        spans=(Span(phase="forward", start=0), Span(phase="backward", start=35), Span(phase="optimizer", start=60)),
        holders=tuple(holders),
    )


@pytest.fixture
def record(make_record: MakeRecord) -> Callable[..., MeasuredRecord]:
    return lambda timeline, **fields: make_record(timeline=timeline, peak_bytes=timeline.peak_bytes, **fields)


def test_a_record_keeps_its_timeline(record: Callable[..., MeasuredRecord]) -> None:
    kept = record(made(host=True))

    assert MeasuredRecord.model_validate_json(kept.model_dump_json()) == kept


def test_records_without_one_are_read(make_record: MakeRecord) -> None:
    line = json.loads(make_record().model_dump_json())
    del line["outcome"]["timeline"]

    assert MeasuredRecord.model_validate(line).outcome == make_record().outcome


@pytest.mark.parametrize("others", [0, LARGEST - 3, LARGEST - 2, 15])
def test_the_rows_of_the_table_add_up_to_the_peak(record: Callable[..., MeasuredRecord], others: int) -> None:
    timeline = made(others=others)
    table = holders_table("this", timeline)
    held = [row["held_bytes"] for row in table.rows]

    assert held[-1] == timeline.peak_bytes == sum(held[:-1])
    assert len(held) == min(3 + others, LARGEST + 1) + 1
    assert [row["module"] for row in table.rows][-2:] == (
        ["all others", "peak"] if 3 + others > LARGEST else [table.rows[-2]["module"], "peak"]
    )
    assert "in the forward pass" in table.notes[0]


def test_what_a_record_does_not_name_is_in_the_last_row(record: Callable[..., MeasuredRecord]) -> None:
    whole = made()
    rest = Holder(module=OTHER, kind="temporary", operator="", tensors=9, held_bytes=5 * MIB)
    timeline = whole.model_copy(update={"holders": (*whole.holders, rest), "peak_bytes": 39 * MIB})

    last = holders_table("this", timeline).rows[-2:]

    assert [(row["module"], row["tensors"], row["held_bytes"]) for row in last] == [
        ("all others", 9, 5 * MIB),
        ("peak", 13, 39 * MIB),
    ]


def test_a_line_has_its_highest_block_at_the_peak() -> None:
    parts, drawn, pointer, scale = sparkline(made(), 200)

    assert (len(drawn), drawn.index("█"), pointer.index("^")) == (71, 30, 30)
    assert [parts.index(name) for name in ("|forward", "|backward", "|optimizer")] == [0, 35, 60]
    assert "34.00 MiB in the forward pass" in pointer
    assert scale == "▁ 4.00 MiB   █ 34.00 MiB"


@pytest.mark.parametrize("width", [1, NARROWEST, 40, 80, 10_000])
def test_a_line_is_as_wide_as_there_is_room(width: int) -> None:
    lines = sparkline(made(), width, ascii_only=True)

    assert "".join(lines).isascii()
    assert len(lines[1]) == max(NARROWEST, min(width, WIDEST, 71))
    assert len(lines[0]) <= len(lines[1])


def test_many_parts_are_letters() -> None:
    spans = [Span(phase=phase, start=start) for start, phase in enumerate(["forward", "backward"] * 4)]
    timeline = made().model_copy(update={"spans": tuple(spans)})

    assert sparkline(timeline, 71)[0] == "|" * 8 + "b"


def test_the_chart_draws_the_bytes_of_the_record() -> None:
    timeline = made(host=True)
    chart = memory_over_steps([("exact", timeline)])[0].chart
    weights, saved, host = (each.get("d") or "" for each in chart.svg.findall("path") if len(each.get("d") or "") > 60)
    told = [each.findtext("title") or "" for each in chart.svg.findall("rect[title]")]

    def heights(path: str) -> list[float]:
        return [float(each) for each in re.findall(r"V([\d.]+)", path)]

    assert heights(weights)[:7] == pytest.approx([chart.at(0, 4 * MIB)[1]] * 7, abs=0.1)
    assert heights(saved)[:7] == pytest.approx([chart.at(0, each)[1] for each in timeline.totals[1:]], abs=0.1)
    assert heights(host) == pytest.approx([chart.at(0, each)[1] for each in ((0, MIB) * 4)[1:]], abs=0.1)
    assert told[3] == "alive 34.00 MiB\nweights 4.00 MiB\nsaved tensors 30.00 MiB"
    assert len(told) == len(timeline.moments)


def test_a_report_draws_the_rows_that_have_one(record: Callable[..., MeasuredRecord], make_record: MakeRecord) -> None:
    records = [record(made()), make_record("checkpoint"), record(made(), scheme="fewbit:3")]
    (group,) = measured.groups_of(join(records))

    titles = [picture.title for picture in group.pictures if picture.title.startswith("Memory over a step")]
    assert titles == ["Memory over a step: exact", "Memory over a step: fewbit:3"]


def test_names_of_modules_are_text(record: Callable[..., MeasuredRecord]) -> None:
    evil = "</script><script>alert(1)</script>\x1b"
    records = [record(made(module=evil))]

    page = html_page(report_tables(records, "Results"), "Results", measured.beside_measured(records))

    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_pictures_are_drawn_without_a_network() -> None:
    drawn = below_each_other(memory_over_steps([("exact", made()), ("<b>&", made(host=True))]))

    texts = " ".join(ElementTree.fromstring(drawn).itertext())
    assert all(text in texts for text in ("saved tensors", "forward", "Memory over a step: <b>&", "alive (MiB)"))


@WITH_CHARTS
def test_a_bitmap_is_drawn_of_them(record: Callable[..., MeasuredRecord]) -> None:
    assert HTML.curves is not None
    what = Exported([], "Steps", [record(made())], print)

    assert bytes(HTML.curves.text(".png", what)).startswith(b"\x89PNG")


def test_without_the_library_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(UsageError, match=r"actbench\[html\]"):
        export.check(".png")
    export.check(".svg")
