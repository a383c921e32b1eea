from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas
import pytest

from actbench.model.estimated import EstimatedTime
from actbench.model.measured import MeasuredRecord, PeakParts
from actbench.report import kinds, render, store, tables
from actbench.report.exporting import Exported
from actbench.report.tables import Table
from actbench.report.tables.computed import step_time_of
from actbench.report.tables.entries import join
from actbench.tools.html import html, measured, training
from actbench.tools.html.charts import Chart, Picture, linear
from actbench.tools.html.export import HTML
from actbench.tools.html.html import MOST_GROUPS, Group, html_page, shown
from actbench.tools.train.records import TrainingRun
from actbench.tools.train.tables import accuracy_table

MakeRecord = Callable[..., MeasuredRecord]
MakeRun = Callable[..., TrainingRun]
ROOT = Path(__file__).parents[3]
VOID = {"meta", "input"}
PICTURE = Picture("t", "a", Chart(linear("x", [0, 1]), linear("y", [0, 1])))
EVIL = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\" ' & \u2028 ]]> <!--"


class Page(HTMLParser):
    """Collects cells, scripts and tags of a page, and fails on a tag that is closed out of turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.values: list[str | None] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.summaries: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th") and ("class", "opener") not in attrs:
            self.cells.append("")
            self.values.append(dict(attrs).get("data-value"))
        if tag == "script":
            self.scripts.append("")
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        if self.open and self.open[-1] == "summary":
            self.summaries.append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def timed(make_record: MakeRecord) -> list[MeasuredRecord]:
    """Return four rows of which ``b`` is beaten by ``a``, and one that failed."""
    parts = PeakParts(weights_bytes=400, activation_bytes=500, temporary_bytes=100)
    return [
        make_record(meter="cpu", peak_bytes=1000, step_seconds=(1.0,), peak_parts=parts),
        make_record("a", meter="cpu", peak_bytes=800, step_seconds=(2.0,), gradient_error=0.0),
        make_record("b", meter="cpu", peak_bytes=900, step_seconds=(3.0,), gradient_error=0.5),
        make_record("c", meter="cpu", peak_bytes=700, step_seconds=(4.0,), gradient_error=math.nan),
        make_record("d", meter="cpu", failure="needs more"),
    ]


def text_of(records: list[MeasuredRecord], title: str = "Results") -> str:
    return html_page(tables.report_tables(records, title), title, measured.beside_measured(records))


def page_of(records: list[MeasuredRecord], title: str = "Results") -> Page:
    return Page(text_of(records, title))


def drawn(text: str, title: str) -> list[list[str]]:
    """Return what the pointer shows of the marks of a chart, by line."""
    (figure,) = [each for each in re.findall(r"<figure.*?</figure>", text, re.DOTALL) if f"<h3>{title}</h3>" in each]
    svg = ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</svg>") + 6])
    return [(each.text or "").split("\n") for each in svg.iter("{http://www.w3.org/2000/svg}title")]


def test_largest_batches_that_were_asked_for_have_a_chart(make_record: MakeRecord) -> None:
    title = "The largest batch"
    records = [make_record(largest_batch=40), make_record("a", largest_batch=64), make_record("b")]

    assert drawn(text_of(records), title) == [["exact", "largest batch 40"], ["a", "largest batch 64"]]
    assert title not in text_of(timed(make_record))


def test_a_page_holds_the_cells_of_markdown_and_its_numbers_in_full(make_record: MakeRecord) -> None:
    table = tables.results_table(timed(make_record), "T")
    page = Page(html_page([table], "T"))
    lines = [line for line in render.markdown(table).splitlines() if line.startswith("| ")]
    cells = [cell.strip() for line in (lines[0], *lines[2:]) for cell in line[2:-2].split(" | ")]
    raw = [value for row in table.rows for value in (row["peak_bytes"], row["relative_throughput"])]
    spreads = [column for column in table.columns if column.spread_of]

    assert page.open == []
    assert [cell.replace("\xa0", " ") for cell in page.cells] == cells
    assert {str(value) for value in raw if value is not None} <= set(page.values)
    assert len(page.cells) % (len([c for c in table.columns if not c.quiet]) - len(spreads)) == 0


def test_charts_hold_the_values_of_records(make_record: MakeRecord) -> None:
    records = timed(make_record)
    text = text_of(records)
    rows = measured.rows_drawn([entry for entry in join(records) if entry.measured])

    assert [(row.name, row.seconds, row.peak_bytes) for row in rows] == [
        ("exact", 1.0, 1000),
        ("a", 2.0, 800),
        ("b", 3.0, 900),
        ("c", 4.0, 700),
    ]
    assert [row.name for row in rows if row.is_best] == ["exact", "a", "c"]
    assert [told[:3] for told in drawn(text, "Memory against time")] == [
        ["exact", "peak: 1,000 B", "step: 1 s, measured"],
        ["a", "peak: 800 B", "step: 2 s, measured"],
        ["b", "peak: 900 B", "step: 3 s, measured"],
        ["c", "peak: 700 B", "step: 4 s, measured"],
    ]
    assert [(told[0], told[3]) for told in drawn(text, "Gradient error and memory")] == [
        ("a", "gradient error: 0"),
        ("b", "gradient error: 0.5"),
    ]
    assert [told[:2] for told in drawn(text, "The peak by kind")] == [
        ["weights 400 B", "of exact"],
        ["saved tensors 500 B", "of exact"],
        ["temporaries 100 B", "of exact"],
    ]


def estimated_time(seconds: float) -> EstimatedTime:
    return EstimatedTime(
        step_seconds=seconds,
        forward_seconds=0.0,
        backward_seconds=seconds,
        optimizer_seconds=0.0,
        host_seconds=0.0,
        device_seconds=seconds,
        flops=0,
        moved_bytes=0,
    )


def test_a_simulated_time_is_marked_as_estimated(make_record: MakeRecord) -> None:
    records = [
        make_record(scheme, meter="cpu", step_seconds=(0.5 + place,), peak_bytes=900 - place)
        for place, scheme in enumerate(("exact", "a"))
    ] + [
        make_record(
            scheme,
            meter="simulated",
            device_profile="cpu",
            estimated=estimated_time(0.5 + place),
            peak_bytes=900 - place,
        )
        for place, scheme in enumerate(("exact", "a"))
    ]
    page = page_of(records)
    sources = [told[2].split(", ")[1] for told in drawn(text_of(records), "Memory against time")]

    assert [(time.seconds, time.is_estimated) for record in records if (time := step_time_of(record))] == [
        (0.5, False),
        (1.5, False),
        (0.5, True),
        (1.5, True),
    ]
    assert sorted(sources) == ["estimated"] * 2 + ["measured"] * 2
    assert page.tags.count("abbr") == 2


def test_a_record_without_a_step_has_no_time(make_record: MakeRecord) -> None:
    assert step_time_of(make_record()) is None
    assert step_time_of(make_record(failure="no")) is None
    assert step_time_of(make_record(step_seconds=(math.inf,))) is None


def test_rows_tell_their_settings_and_command(make_record: MakeRecord) -> None:
    records = [make_record("z"), make_record("exact", seed=7), make_record("a", failure="needs <more>")]
    page = page_of(records)
    texts = page.data["texts"]
    told = [{heading: texts[place] for heading, place in row.items()} for row in page.data["rows"]]
    schemes = [row["scheme"] for row in tables.results_table(records).rows]

    assert len(told) == 3
    for scheme, row in zip(schemes, told, strict=True):
        assert f"scheme {scheme}," in row["Settings"]
        assert row["Command"] == "actbench sweep made"
    assert any("seed 7" in row["Settings"] for row in told)
    assert [row["Failure"] for row in told if "Failure" in row] == ["out-of-memory: needs <more>"]


def test_names_are_text_and_never_markup(make_record: MakeRecord) -> None:
    evil = [
        make_record("exact", model=EVIL, label=EVIL, meter="cpu", step_seconds=(1.0,)),
        make_record("x", model=EVIL, label=EVIL, meter="cpu", step_seconds=(2.0,), warnings=(EVIL,)),
        make_record("y", model=EVIL, failure=EVIL),
    ]
    harmless = [make_record(scheme, meter="cpu", step_seconds=(1.0,)) for scheme in ("exact", "x")]
    page, plain = page_of(evil, EVIL), page_of(harmless)

    assert page.open == []
    assert set(page.tags) - {"li"} <= set(plain.tags)
    assert len(page.scripts) == len(plain.scripts) == 2
    assert not re.search(r"[<>&\u2028]", page.scripts[0])
    assert page.summaries[0].startswith(EVIL.replace("\u2028", "\\u2028"))


def test_the_policy_of_a_page_lets_its_own_scripts_run_and_nothing_else(make_record: MakeRecord) -> None:
    page = page_of(timed(make_record))
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in page.scripts[1:]]

    assert page.policy.startswith("default-src 'none'; ")
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    assert f"script-src {allowed};" in page.policy
    assert not {"link", "img", "iframe"} & set(page.tags)


def test_runs_have_learning_curves_with_the_spread_of_their_seeds(make_run: MakeRun) -> None:
    runs = [
        make_run(scheme, seed, accuracy, losses=losses)
        for scheme in ("exact", "fewbit:3")
        for seed, accuracy, losses in ((0, 0.8, (2.0, 1.0)), (1, 0.9, (4.0, math.inf)))
    ]
    text = html_page([accuracy_table(runs, "T")], "T", training.beside_trained(runs))
    page, loss = Page(text), drawn(text, "Training loss")

    assert [told for told in loss if told[0] == "exact"] == [["exact", "step 1", "training loss 3 ± 1.4"]], (
        "an infinite loss is not drawn"
    )
    scores = drawn(text, "Accuracy on the validation set")
    assert [told[2] for told in scores] == ["accuracy 0.85 ± 0.071"] * 2
    assert [page.data["texts"][row["Seeds"]] for row in page.data["rows"]] == ["0, 1"] * 2


def test_a_page_opens_with_the_group_that_was_asked_for_first() -> None:
    first, richer = Group("asked", (PICTURE,)), Group("other", (PICTURE,) * 2)

    assert [group.name for group in shown([Group("empty", ()), first, richer])] == ["asked", "other"]
    assert {group.name for group in shown([first, *[richer] * MOST_GROUPS])} == {"other"}, "with the fewest charts"


def test_a_page_of_very_many_groups_draws_the_first_and_says_so() -> None:
    groups = [Group(str(place), (PICTURE,)) for place in range(MOST_GROUPS + 3)]

    assert len(shown(groups)) == MOST_GROUPS
    assert shown(groups)[0].remarks == ("3 more groups of rows have no charts here: make a report of fewer records.",)


def test_a_table_without_columns_is_a_title() -> None:
    assert "<h2>Nothing</h2>" in html_page([Table("Nothing", (), pandas.DataFrame())], "x")


def test_a_very_long_table_says_that_its_rows_do_not_open(
    monkeypatch: pytest.MonkeyPatch, make_record: MakeRecord
) -> None:
    monkeypatch.setattr(html, "MOST_DETAILED", 2)
    records = [make_record(f"s{place}") for place in range(3)]
    text = html_page([tables.results_table(records)], "Results", measured.beside_measured(records))

    assert "have no settings to open here" in text
    assert Page(text).data["rows"] == []


COMMITTED = dict(
    re.findall(
        r'actbench report results/([\w-]+) --title "(.+?)" --html docs/reports/', (ROOT / "Makefile").read_text()
    )
)


@pytest.mark.parametrize("recipe", ["quickstart", "finetune-8b"])
def test_the_pages_of_this_repository_are_what_its_records_give_today(recipe: str) -> None:
    """``make pages`` writes them."""
    file = ROOT / "docs" / "reports" / f"{recipe}.html"
    records, _ = store.read_all(kinds.files_in([ROOT / "results" / recipe]), MeasuredRecord)
    tables_of = tables.report_tables(records, COMMITTED[recipe])[:1]
    made = "".join(HTML.text(Exported(tables_of, COMMITTED[recipe], records, print)))

    assert file.read_text(encoding="utf-8") == made, "make pages"
    assert made.count("<svg") >= 2
    assert len(made) < 500_000
