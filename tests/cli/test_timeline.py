"""``measure --timeline`` and its files."""

from __future__ import annotations

import json
import pickletools
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actbench.cli.printing import ProgressFlags
from actbench.cli.timeline import TimelineFlags, export_again, export_timelines, files_of, line_of, tables_of
from actbench.model.measured import MeasuredRecord
from actbench.model.timeline import Holder, Span, Timeline

CASE = ("measure", "tiny-gpt2", "-b", "2", "--sequence-length", "16", "--meter", "simulated")


@pytest.mark.parametrize(
    ("flags", "naming"),
    [
        (("--export-timeline", "x.txt"), "x.txt: name a file that ends in .png, .svg, .html, .json"),
        (("--export-timeline", "-"), "name a file that ends in"),
        (("--export-flamegraph", "x.svg"), "--export-flamegraph x.svg: name a file that ends in .html"),
        (("--export-speedscope", "-"), "--export-speedscope -: name a file that ends in .json"),
        (("--export-perfetto", "x"), "--export-perfetto x: name a file that ends in .json"),
        (("--export-perfetto", "x.json", "--export-speedscope", "x.json"), "x.json"),
        (("--ledger", "--export-perfetto", "x.json"), "--export-perfetto: not with --ledger"),
        (("--export-snapshot", "-"), "a pickle is not text"),
        (("--ledger", "--timeline"), "--timeline: not with --ledger, which lists what is saved, and runs no step"),
        (("--ledger", "--export-snapshot", "x.pickle"), "--export-snapshot: not with --ledger"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...], naming: str
) -> None:
    monkeypatch.chdir(tmp_path)

    cli.refused(*CASE, *flags, naming=naming)

    assert not list(tmp_path.iterdir())


@pytest.fixture
def records(make_record: Callable[..., MeasuredRecord]) -> list[MeasuredRecord]:
    """Rows of two schemes whose memory over a step is known, and one that has failed."""
    holder = Holder(module="layer", kind="saved", operator="aten::mm", tensors=1, held_bytes=1000)
    timeline = Timeline(
        peak_bytes=1000,
        peak_event=1,
        events=2,
        moments=(0, 1, 2),
        held_bytes={"saved": (0, 1000, 0)},
        spans=(Span(phase="forward", start=0),),
        holders=(holder,),
    )
    measured = [make_record(scheme, timeline=timeline) for scheme in ("exact", "fewbit:3")]
    return [*measured, make_record("offload", failure="no")]


@pytest.mark.parametrize(("suffix", "begins"), [("json", "["), ("html", "<!doctype html>"), ("svg", "<svg")])
def test_the_suffix_chooses_the_form(records: list[MeasuredRecord], tmp_path: Path, suffix: str, begins: str) -> None:
    file = tmp_path / f"memory.{suffix}"

    export_timelines(records, TimelineFlags(export_timeline=file))

    text = file.read_text()
    assert text.startswith(begins)
    assert "fewbit:3" in text
    assert "offload" not in text


def test_nothing_is_written_where_nothing_was_measured(
    records: list[MeasuredRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = TimelineFlags(export_timeline=tmp_path / "x.json", export_snapshot=tmp_path / "x.pickle")

    export_timelines(records[2:], flags)
    export_again(records[2:], flags, ProgressFlags(), timeout=1.0)

    assert capsys.readouterr().err.count("is not written: no case was measured") == 2
    assert not list(tmp_path.iterdir())


TERMINALS = [(True, "xterm", True), (True, "dumb", False), (False, "", False)]


@pytest.mark.parametrize(("terminal", "term", "blocks"), TERMINALS)
def test_the_line_is_plain_in_pipes_and_on_dumb_terminals(
    records: list[MeasuredRecord], monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str, blocks: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    timeline = records[0].outcome.timeline

    lines = line_of(timeline, Console(file=TextIOWrapper(BytesIO(), "utf-8"), force_terminal=terminal))

    assert ("█" in lines[1]) is blocks
    assert "".join(lines).isascii() is not blocks


def test_each_of_several_cases_has_a_file_of_its_own(make_record: Callable[..., MeasuredRecord]) -> None:
    rows = [("exact", "cpu"), ("fewbit:3,functions=gelu", "cpu"), ("exact", "simulated"), ("exact", "simulated")]
    records = [make_record(scheme, meter=meter) for scheme, meter in rows]

    assert files_of(Path("a/x.pickle"), records[:1]) == [Path("a/x.pickle")]
    assert [path.name for path in files_of(Path("a/x.pickle"), records)] == [
        "x-exact.pickle",
        "x-fewbit-3-functions-gelu.pickle",
        "x-exact-simulated-8.pickle",
        "x-exact-3.pickle",
    ]


def test_cases_that_differ_in_a_setting_have_it_in_titles_and_files(records: list[MeasuredRecord]) -> None:
    exact, packed, failed = records
    longer = [
        exact.model_copy(update={"case": exact.case.model_copy(update={"sequence_length": length})})
        for length in (128, 512)
    ]

    assert [table.title for table in tables_of([*longer, failed])] == [
        "Who holds the peak of exact on tiny, sequence length 128",
        "Who holds the peak of exact on tiny, sequence length 512",
    ]
    assert [path.name for path in files_of(Path("x.pickle"), longer)] == [
        "x-exact-sequence-length-128.pickle",
        "x-exact-sequence-length-512.pickle",
    ]
    assert "length" not in "".join(table.title for table in tables_of([exact, packed]))


@pytest.mark.exhaustive
def test_the_holders_are_shown_and_written(cli: Any, tmp_path: Path) -> None:
    files = {suffix: tmp_path / f"memory.{suffix}" for suffix in ("json", "html", "pickle")}
    exports = ("--export-timeline", files["html"], "--export-snapshot", files["pickle"], "--export-json", files["json"])

    ended = cli(*CASE, "-s", "checkpoint", "--timeline", *exports)

    assert ended.status == 0, ended.err
    assert ended.out.count("Who holds the peak of") == 2
    assert "AdamW state" in ended.out
    lines = ended.out.splitlines()
    assert any(line.startswith("|forward") for line in lines)
    assert not set(ended.out) & set("▁▂▃▄▅▆▇█")
    for outcome in (record["outcome"] for record in json.loads(files["json"].read_text())):
        held = [each["held_bytes"] for each in outcome["timeline"]["holders"] if each["kind"] != "host"]
        assert sum(held) == outcome["timeline"]["peak_bytes"] == outcome["peak_bytes"]
    assert "Memory over a step: checkpoint on tiny-gpt2" in files["html"].read_text()
    for scheme in ("exact", "checkpoint"):
        assert list(pickletools.genops((tmp_path / f"memory-{scheme}.pickle").read_bytes()))
