"""The page in a browser that is installed: it opens without errors and the network, sorts, filters and draws."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from randomsteps import random_step

from actbench.measuring.meters.peak import alive
from actbench.model.measured import MeasuredRecord
from actbench.report import store, tables
from actbench.report.compare import compare
from actbench.report.exporting import Exported
from actbench.report.plain import plain
from actbench.tools.html import measured
from actbench.tools.html.flamegraph import flame_page
from actbench.tools.html.html import html_page

MakeRecord = Callable[..., MeasuredRecord]
DATA = Path(__file__).parents[2] / "data"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None or importlib.util.find_spec("playwright") is None, reason="no browser, or no playwright"
)
STEP = random_step(3000)
TIMELINE = STEP.timeline()
EVIL = "</script><img src=x onerror='document.title=1'>\" \u2028"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Return a function that opens a page from disk; in the end none has written to its console or asked for files."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": 1400, "height": 900})

    def load(text: str) -> Any:
        file = tmp_path / "page.html"
        file.write_text(text)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url != file.as_uri() else None)
        page.goto(file.as_uri())
        return page

    yield load
    context.close()
    assert said == []


def column(page: Any, title: str) -> list[str]:
    """Return the texts of a column's rows that are shown."""
    script = """title => {
        const table = document.querySelector("table");
        const place = [...table.tHead.rows[0].cells].findIndex(cell => cell.textContent.startsWith(title));
        const rows = [...table.tBodies[0].rows].filter(row => !row.hidden && row.className !== "details");
        return rows.map(row => row.cells[place].dataset.value ?? row.cells[place].textContent);
    }"""
    found: list[str] = page.evaluate(script, title)
    return found


def records_of_quickstart() -> list[MeasuredRecord]:
    return store.read_results(DATA / "quickstart-2026-11.jsonl").records


def report(records: list[MeasuredRecord], title: str = "Results") -> str:
    return html_page(tables.report_tables(records, title), title, measured.beside_measured(records))


@pytest.mark.slow
def test_a_table_sorts_by_numbers_filters_and_opens_its_rows(opened: Callable[[str], Any]) -> None:
    records = records_of_quickstart()
    page = opened(report(records))
    peaks = [record.outcome.peak_bytes for record in records if record.outcome.peak_bytes is not None]

    before = column(page, "Peak")
    page.click("th button:text('Peak')")
    assert column(page, "Peak") == [str(peak) for peak in sorted(peaks)]
    page.click("th button:text('Peak')")
    assert column(page, "Peak") == [str(peak) for peak in sorted(peaks, reverse=True)]
    page.click("th button:text('Peak')")
    assert column(page, "Peak") == before

    page.click("th button:text('Speed')")
    known = [value for value in column(page, "Speed") if value != "–"]
    assert known == sorted(known, key=float)
    assert column(page, "Speed")[-1] == "–", "what is missing comes last"

    page.fill("input[type=search]", "fewbit:3 CPU")
    assert len(column(page, "Scheme")) == sum(
        "fewbit:3" in record.case.scheme and record.case.meter == "cpu" for record in records
    )
    page.click("tbody tr:not([hidden]) .opener button")
    assert "actbench sweep recipes/quickstart.toml" in page.inner_text("tr.details:not([hidden])")
    assert not page.is_visible("th.more")
    page.check("label:has-text('all columns') input")
    assert page.is_visible("th.more")


def test_a_comparison_is_whole_on_a_screen_of_1400_pixels(
    opened: Callable[[str], Any], make_record: MakeRecord
) -> None:
    model = "vit-base-patch16-224@num_hidden_layers=2"
    schemes = ("exact", "chunked_loss:8+checkpoint+optimizer_offload+release")
    before = [
        make_record(scheme, model=model, peak_bytes=10**9, meter="cpu", step_seconds=(0.5,), largest_batch=40)
        for scheme in schemes
    ]
    table = compare(before, [make_record("offload", model=model, meter="cpu", failure="no memory")]).table
    page = opened(html_page([table], table.title))
    edges = page.evaluate("[...document.querySelectorAll('th')].map(cell => cell.getBoundingClientRect().right)")

    assert "Status B" in page.inner_text("thead")
    assert max(edges) <= 1400
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400


def test_hostile_names_are_shown_as_they_are(opened: Callable[[str], Any], make_record: MakeRecord) -> None:
    page = opened(report([make_record("exact", model=EVIL), make_record("x", model=EVIL, failure=EVIL)], EVIL))

    assert column(page, "Model") == [EVIL.replace("\u2028", "\\u2028")] * 2
    assert page.title() != "1"
    page.click(".opener button >> nth=1")
    assert EVIL.partition("\u2028")[0].strip() in page.inner_text("tr.details")


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_drawn_with_every_row_and_hostile_names(
    opened: Callable[[str], Any], make_record: MakeRecord, scheme: str
) -> None:
    records = [
        *records_of_quickstart(),
        *(
            make_record(name, model=EVIL, label=name + EVIL, peak_bytes=900, meter="cpu", step_seconds=(seconds,))
            for name, seconds in (("exact", 1.0), ("x", 2.0))
        ),
    ]
    page = opened(report(records))
    page.emulate_media(color_scheme=scheme)
    timed = [record for record in records if getattr(record.outcome, "step_seconds", None)]
    groups = page.locator("details.charts")

    assert groups.evaluate_all("all => all.map(each => each.open)") == [True, False]
    titles = page.locator("figure", has_text="Memory against time").locator("path title")
    told = titles.evaluate_all("all => all.map(each => each.textContent.split('\\n')[0])")
    assert sorted(told) == sorted(plain(record.label or record.case.scheme) for record in timed)
    assert page.locator("figure svg").count() == page.locator("figure").count() > 1
    assert page.locator("figure svg").first.bounding_box()["height"] > 100
    groups.last.locator("summary").click()
    assert groups.last.locator("figure svg").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400


def test_a_flame_graph_follows_its_slider_and_zooms(opened: Callable[[str], Any]) -> None:
    page = opened("".join(flame_page(Exported([], "Who holds the memory", [], print), [("exact", TIMELINE)])))
    place = TIMELINE.samples.index(TIMELINE.peak_event) - 1
    before = sum(alive(STEP.events[: STEP.before + TIMELINE.samples[place]]).values())

    def width() -> float:
        return float(page.locator("#frames button").first.bounding_box()["width"])

    whole = width()
    assert page.inner_text("#when").startswith("the peak, after")
    edges = page.evaluate(
        "[...document.querySelectorAll('#frames button')].map(frame => frame.getBoundingClientRect().right)"
    )
    assert max(edges) <= edges[0] + 1, "narrow frames are as wide as their bytes"
    page.focus("#moment")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#when").startswith(f"after {TIMELINE.samples[place]} of")
    assert width() == pytest.approx(whole * before / TIMELINE.peak_bytes, abs=1)
    page.click("#frames button >> nth=1")
    assert page.is_visible("#out")
    page.keyboard.press("Escape")
    page.click("#top")
    assert width() == pytest.approx(whole, abs=1)
    page.fill("#search", "part3")
    assert page.locator("#frames button:not(.faint)").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400


def test_a_flame_graph_without_moments_has_no_slider(opened: Callable[[str], Any]) -> None:
    older = TIMELINE.model_copy(update={"samples": (), "sampled": ()})
    page = opened("".join(flame_page(Exported([], "Who holds the memory", [], print), [("exact", older)])))

    assert page.locator("#frames button").count() > 1
    assert not page.is_visible("#moment")
