"""Plug-ins that can be imported and are not what their group asks for: each is left out with the reason."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from strangerspackage import installed_in, left_out

ENTRIES = """
[actbench.workloads]
whole = theirs:WHOLE
mute = theirs:MUTE
text = theirs:TEXT

[actbench.kinds]
other = theirs:OTHER

[actbench.exports]
first = theirs:FIRST
helps = theirs:HELPS
page = theirs:PAGE
second = theirs:SECOND
taken = theirs:TAKEN
titles = theirs:TITLES

[actbench.schemes]
cardless = theirs:Cardless
nameless = theirs:Nameless

[actbench.meters]
stopwatch = theirs:TEXT

[actbench.executors]
brew = theirs:Brewery
text = theirs:TEXT
"""
MODULE = """
from typing import ClassVar
from actbench.report.exporting import ExportFormat
from actbench.report.kinds import Kind
from actbench.scheme import Scheme

TEXT = "no plug-in"
OTHER = Kind("another", object, lambda records, title: ())
FIRST, SECOND, HELPS, TITLES, PAGE, TAKEN = (
    ExportFormat("Write.", lambda what: "written", also=f"--{name}")
    for name in ("twin", "twin", "help", "title", "html", "export-first")
)

class Whole:
    task, note = "image-classification", "a note of theirs"
    def __call__(self, changes, case): ...

WHOLE = Whole()
def MUTE(changes, case): ...

class Cardless(Scheme):
    name: ClassVar[str] = "cardless"
    def change(self, setup):
        return setup

class Nameless(Scheme): ...

class Brewery: ...
"""
REASONS = {
    ("workloads", "mute"): "theirs:MUTE is a function and no Network",
    ("workloads", "text"): "theirs:TEXT is a str and no Network",
    ("kinds", "other"): "its kind has another name: 'another'",
    ("exports", "helps"): "no flag can be --export-helps --help",
    ("exports", "titles"): "no flag can be --export-titles --title",
    ("exports", "taken"): "no flag can be --export-taken --export-first",
    ("exports", "page"): f"--export-html of actbench {version('actbench')} is --html already",
    ("exports", "second"): "--export-first of theirs 1.0 is --twin already",
    ("schemes", "cardless"): "it has no card, which says what it does: card: ClassVar[Card] = Card(summary=...)",
    ("schemes", "nameless"): "it is no Scheme whose name is 'nameless'",
    ("meters", "stopwatch"): "theirs:TEXT is a str and no MeterKind",
    ("executors", "text"): "theirs:TEXT is a str and no Opening",
}


@pytest.fixture
def theirs(tmp_path: Path) -> Any:
    return installed_in(tmp_path, ENTRIES, {"theirs": MODULE})


def of_group(group: str) -> dict[tuple[str, str], str]:
    return {key: why for key, why in REASONS.items() if key[0] == group}


@pytest.mark.slow
def test_doctor_leaves_out_what_is_left_out_elsewhere(theirs: Any) -> None:
    lines = [" ".join(line.split()) for line in theirs("doctor").stdout.splitlines()]

    broken = [line for line in lines if "of theirs 1.0, is left out" in line]
    assert sorted(broken) == sorted(
        f"– Plug-ins: {group} {name}, of theirs 1.0, is left out: {why} update or remove theirs"
        for (group, name), why in REASONS.items()
    )
    assert "ok Plug-ins: workloads whole, of theirs 1.0" in lines
    assert "ok Plug-ins: exports first, of theirs 1.0" in lines
    assert "ok Plug-ins: executors brew, of theirs 1.0" in lines
    assert any(line.startswith("ok Plug-ins: executors cluster, ranks, of actbench") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "group", "shown"),
    [
        pytest.param(("schemes",), "schemes", "checkpoint", marks=pytest.mark.exhaustive),
        pytest.param(("models",), "workloads", "a note of theirs", marks=pytest.mark.exhaustive),
        pytest.param(("report", "--help"), "exports", "--twin", marks=pytest.mark.exhaustive),
    ],
)
def test_a_list_goes_on_without_them(theirs: Any, arguments: tuple[str, ...], group: str, shown: str) -> None:
    ended = theirs(*arguments)

    assert (ended.returncode, left_out(ended.stderr)) == (0, of_group(group))
    assert shown in ended.stdout


@pytest.mark.exhaustive
def test_help_stays_help_and_a_kind_of_another_name_reads_no_file(theirs: Any, tmp_path: Path) -> None:
    (tmp_path / "kettle.other.jsonl").write_text("{}\n")

    ended = theirs("report", "kettle.other.jsonl")

    assert theirs("report", "--help").stdout.lstrip().startswith("Usage: actbench report")
    assert ended.returncode == 2
    assert "that reads it cannot be used: its kind has another name: 'another'" in ended.stderr


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_made_is_a_message(theirs: Any) -> None:
    ended = theirs("measure", "mute", "-s", "exact")

    assert "Traceback" not in ended.stderr
    assert "model 'mute': the package that brings it cannot be used" in ended.stderr + ended.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("measure", "tiny-bert", "-s", "exact")])
def test_an_installation_without_its_entry_points_says_so_once(arguments: tuple[str, ...]) -> None:
    code = (
        "import importlib.metadata as metadata, sys\nmetadata.entry_points = lambda **_: metadata.EntryPoints(())\n"
        f"sys.argv = ['actbench', *{arguments!r}]\nfrom actbench.cli import main\nmain()"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert ended.stderr.count("the entry points of actbench are not installed as they are here") == 1
    assert "run 'pip install -e .' again" in ended.stderr
    assert "Traceback" not in ended.stderr
