"""What files, models and machines say is shown as text, wherever it goes."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import example, given, strategies as st
from markdown_it import MarkdownIt

from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case, Failure
from actbench.report import render
from actbench.report.plain import csv_cell, markdown, plain
from actbench.report.tables import Table
from actbench.report.tables.values import Column
from actbench.run.display import shown
from actbench.tools.html import html as page

MakeRecord = Callable[..., MeasuredRecord]

EVIL = "\x1b[31m\x9b2J\x1b]8;;http://evil\x07\u202eevil\u2028"
HIDDEN = ("\x1b", "\x9b", "\x07", "\u202e", "\u2028")
FORMULAS = ["=1+1", "@SUM(A1)", "+cmd", "-cmd|' /C calc'!A0", "\t=1", "\n=1", "\r=1", "＝1", "=\x1b1"]


@given(st.text())
@example(EVIL)
@example("\r\n\t\x00\x7f\x85\u2066\ufeff\U000e0041\udc80")
def test_plain_text_has_no_character_that_is_not_seen(text: str) -> None:
    shown = plain(text)

    hidden = {letter for letter in shown if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert hidden <= {"\n", "\t", "\u200c", "\u200d"}
    assert plain(shown) == shown


def test_letters_of_every_script_stay() -> None:
    text = "modèle – 模型 ↓\n\tनमस्\u200dते 👩\u200d🔬\xa0±"

    assert plain(text) == text


def parsed(text: str) -> list[Any]:
    """Return the tokens in which a Markdown parser finds something else than a line of text."""
    found = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(f"| a | b |\n|---|---|\n| {text} | end |")
    cells = [token for token in found if token.type == "inline"]
    assert [cell.content for cell in cells][:2] == ["a", "b"]
    assert [cell.content for cell in cells][3:] == ["end"]
    return cells[2].children or []


@given(st.text(st.sampled_from("\\`*_[]()<>&|~!#-:/. ab0\n")) | st.text())
@example('<script>alert(1)</script> <img src="x" onerror="y"> &lt; &#60;')
@example("[here](http://evil) ![x](http://evil) <http://evil> [r]: http://evil")
@example("\\| `x` \\` ``a|b`` ~~gone~~ **loud** __loud__")
def test_markdown_shows_any_text_and_makes_nothing_of_it(text: str) -> None:
    tokens = parsed(markdown(text))

    assert {token.type for token in tokens} <= {"text", "text_special"}
    assert " ".join("".join(token.content for token in tokens).split()) == " ".join(plain(text).split())


@pytest.mark.parametrize("text", ["http://evil", "see HTTPS://evil.org/x", "www.evil.org", "WWW.evil.org"])
def test_addresses_in_markdown_are_no_links(text: str) -> None:
    written = markdown(text)

    assert "://" not in written
    assert "www." not in written.lower()
    assert "".join(token.content for token in parsed(written)) == text


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_text_in_csv(text: str) -> None:
    columns = Column("x", "x", "text", str), Column("y", "y", "number", float)
    table = Table("t", columns, pandas.DataFrame({"x": [text], "y": [-3.5]}, dtype=object))
    [_, [cell, number]] = csv.reader(io.StringIO(render.csv_text(table)))

    assert cell == "'" + plain(text)
    assert number == "-3.5"


@pytest.mark.parametrize("text", ["-3.5", "+1e-9", "-inf", "fewbit:3", "a=b", "–", ""])
def test_numbers_and_names_in_csv_stay_as_they_are(text: str) -> None:
    assert csv_cell(text) == text


def test_no_export_has_hidden_characters(make_record: MakeRecord) -> None:
    from actbench.report import tables

    records = [make_record(label=EVIL, model=EVIL, machine=EVIL, failure=EVIL), make_record(warnings=(EVIL,))]
    table = tables.results_table(records, EVIL)

    for text in (render.markdown(table), render.csv_text(table), page.html_page([table], EVIL)):
        assert r"\x1b[31m" in text.replace("\\\\", "\\").replace("\\[", "[")
        assert [character for character in HIDDEN if character in text] == []


def test_report_shows_no_hidden_characters(cli: Any, tmp_path: Path, make_record: MakeRecord) -> None:
    file = tmp_path / "results.jsonl"
    records = [make_record(label=EVIL, model=EVIL, warnings=(EVIL,)), make_record("offload", failure=EVIL)]
    file.write_text("".join(record.model_dump_json() + "\n" for record in records))
    ended = cli("report", file, "--title", EVIL)
    refused = cli("report", tmp_path / EVIL.replace("/", ""))

    assert (ended.status, refused.status) == (0, 2)
    assert r"\x1b[31m" in ended.out
    assert r"\x1b[31m" in refused.err
    assert [character for character in HIDDEN if character in ended.out + ended.err + refused.err] == []


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_no_hidden_characters(terminal: bool) -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=terminal, width=300, color_system=None)
    case = Case(model=EVIL, scheme="exact", batch_size=8)
    with shown(console, verbose=not terminal) as progress:
        progress.planned([case], 1)
        progress.started(case)
        progress.message(EVIL)
        progress.finished(case, Failure(reason="crash", message=EVIL))
    written = console.file.getvalue()  # type: ignore[attr-defined]

    assert written.count(r"\x1b[31m") >= 3
    assert [text for text in ("\x1b[31m", "\x9b", "\x07", "\u202e", "\u2028") if text in written] == []
