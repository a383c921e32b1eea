from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable

import pandas
import pytest

from actbench.model.measured import MeasuredRecord
from actbench.model.provenance import Published
from actbench.report import render, tables
from actbench.report.tables import Table
from actbench.report.tables.table import fill
from actbench.report.tables.values import Column
from actbench.tools.html import html as page

MakeRecord = Callable[..., MeasuredRecord]

MARKDOWN = """\
## What does fewbit save?

| Model | Batch | Scheme | Meter | Peak ↓ | Saved ↑ | Saved, published | Activations ↓ | Smaller by ↑ | Samples/s ↑ \
| Speed ↑ | Step ↓ | Pareto | Status |
| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |
| tiny | 8 | exact | cpu | 1.50 GiB | 0.0 % | – | 600 B | 1.00x | 16 ± 1.6 | 1.00x | 500 ms ± 50 ms | yes |  |
| tiny | 8 | fewbit:3 | cpu | 1.20 GiB | 20.0 % | 13.8 % | 200 B | 3.00x | 8 ± 0 | 0.50x ± 0.05x | 1 s ± 0 ns | yes |  |
| tiny | 8 | offload | cpu | – | – | – | – | – | – | – | – |  | out-of-memory |

- Same in all rows: meter cpu, task auto, attention sdpa, type float32, optimizer adamw, weights random, seed 0.
- Measured on box (a processor, 2 cores) with actbench 0.1.0, commit 0123456, torch 2.11.0.
- Published for fewbit:3: peak saving 13.8 % (batch 128; table 4).
- tiny, offload, batch 8 (cpu): out-of-memory: needs 3 GiB \\| 2 may be used
"""

CSV = """\
model,batch_size,scheme,meter,peak_bytes,peak_saving,published_peak_saving,activation_bytes,activation_ratio,\
weights_bytes,samples_per_second,samples_per_second_spread,relative_throughput,relative_throughput_spread,step_seconds,\
step_seconds_spread,pareto,status
tiny,8,exact,cpu,1610612736,0.0,,600,1.0,400,16.0,1.6,1.0,,0.5,0.05,True,
tiny,8,fewbit:3,cpu,1288490189,0.19999999987582364,0.138,200,3.0,400,8.0,0.0,0.5,0.05,1.0,0.0,True,
tiny,8,offload,cpu,,,,,,,,,,,,,,out-of-memory
"""


@pytest.fixture
def records(make_record: MakeRecord) -> list[MeasuredRecord]:
    published = (Published(quantity="peak_saving", value=0.138, setting="batch 128", source="table 4"),)
    exact = make_record(meter="cpu", peak_bytes=3 * 1024**3 // 2, step_seconds=(0.4, 0.45, 0.5, 0.55, 0.6))
    fewbit = make_record(
        "fewbit:3",
        meter="cpu",
        peak_bytes=1288490189,
        activation_bytes=200,
        step_seconds=(1.0, 1.0, 1.0),
        published=published,
    )
    failed = make_record("offload", meter="cpu", failure="needs 3 GiB | 2 may be used")
    return [exact, fewbit, failed]


@pytest.fixture
def table(records: list[MeasuredRecord]) -> Table:
    return tables.results_table(records, "What does fewbit save?")


def test_markdown(table: Table) -> None:
    assert render.markdown(table) == MARKDOWN


def rounded(text: str) -> list[list[object]]:
    """Read CSV with numbers at 12 digits: the last bits of a quartile are not the renderer's business."""

    def value(cell: str) -> object:
        try:
            return float(f"{float(cell):.12g}")
        except ValueError:
            return cell

    return [[value(cell) for cell in row] for row in csv.reader(io.StringIO(text))]


def test_csv_has_raw_keys_and_base_units(table: Table) -> None:
    assert rounded(render.csv_text(table)) == rounded(CSV)
    assert render.csv_text(table).splitlines()[0] == CSV.splitlines()[0]


def test_json_is_the_list_of_records(records: list[MeasuredRecord]) -> None:
    found = json.loads(render.json_text(records))

    assert [MeasuredRecord.model_validate(item) for item in found] == records
    assert found[0]["schema_version"] == 1
    assert found[0]["outcome"]["kind"] == "measured"
    assert found[0]["outcome"]["reserved_bytes"] is None
    assert found[2]["outcome"]["reason"] == "out-of-memory"


def test_json_of_no_number_is_what_a_results_file_says(make_record: MakeRecord) -> None:
    record = make_record(gradient_error=math.nan)
    (found,) = json.loads(render.json_text([record]))

    assert found == json.loads(record.model_dump_json())
    assert found["outcome"]["gradient_error"] == "NaN"


def test_json_is_indented_as_a_list(records: list[MeasuredRecord]) -> None:
    text = render.json_text(records)

    assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
    assert render.json_text([]) == "[]\n"


def test_what_a_user_named_cannot_break_a_format() -> None:
    nasty = '<b>|\n"a",b\\'
    table = Table(nasty, (Column("x", nasty, "text", str),), pandas.DataFrame({"x": [nasty]}, dtype=object), (nasty,))

    assert render.markdown(table).splitlines()[4] == '| &lt;b&gt;\\| "a",b\\\\ |'
    assert list(csv.reader(io.StringIO(render.csv_text(table)))) == [["x"], [nasty]]
    assert "<b>" not in page.html_page([table], nasty)


def test_an_empty_table_is_a_title() -> None:
    table = Table("Nothing", (), pandas.DataFrame())

    assert render.markdown(table) == "## Nothing\n"
    assert render.csv_text(table) == "\n"
    assert "<h2>Nothing</h2>" in page.html_page([table], "x")


def test_a_nan_is_a_value_and_none_is_unknown() -> None:
    columns = Column("x", "X", "number", lambda value: value), Column("y", "Y", "count", lambda value: 2**60 + 1)
    table = fill("t", columns, [math.nan, None, 0.5])

    assert [row.split(" | ")[0] for row in render.markdown(table).splitlines()[4:]] == ["| nan", "| –", "| 0.5"]
    assert render.csv_text(table) == "x,y\nnan,1152921504606846977\n,1152921504606846977\n0.5,1152921504606846977\n"
