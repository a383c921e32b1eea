"""What an installed package adds: a package of a stranger's, with whole and broken plug-ins, beside actbench's own."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import pytest
from strangerspackage import installed_in, left_out

from actbench import plugins

ENTRIES = """
[actbench.commands]
greet = theirs:greet
several = theirs:several
convert = theirs:greet
measure = theirs:greet
raises = theirs_broken:greet
lacking = theirs:no_such_name
text = theirs:TEXT
empty = theirs:empty
strange = theirs:strange
usual = theirs:usual

[actbench.kinds]
mine = theirs_kind:MINE
bad = theirs_broken:BAD

[actbench.exports]
shout = theirs:SHOUT
fails = theirs:FAILS
late = theirs:LATE
picture = theirs:PICTURE
csv = theirs:SHOUT

[actbench.schemes]
halved = theirs:Halved
quartered = theirs_broken:Quartered
"""
MODULES = {
    "theirs": '''
import typer
from actbench.cli.app import command
from actbench.report.exporting import Exported, ExportFormat

TEXT = "no command"
greet, several, empty, strange = typer.Typer(), typer.Typer(), typer.Typer(), typer.Typer()
class Halved: pass

@greet.command()
def _greet(name: str, loud: bool = False) -> None:
    """Greet somebody."""
    print(f"hello {name}", "!" * loud)

@several.command()
def one() -> None:
    print("one")

@several.command()
def two() -> None:
    print("two")

@strange.command()
def _strange(what: int | str) -> None: ...

@command(usual="--loud --nothing")
def usual(loud: bool = False) -> None: ...

def shouted(what: Exported) -> str:
    what.remark(f"{len(what.records)} records")
    return f"{what.title}: {len(what.tables)}".upper()

def late(what):
    yield "a line"
    raise KeyError("late")

SHOUT = ExportFormat("Shout the title.", shouted, also="--shout")
FAILS = ExportFormat("Fail.", lambda what: 1 / 0)
LATE = ExportFormat("Fail late.", late)
PICTURE = ExportFormat("Draw.", lambda what: b"bytes")
''',
    "theirs_kind": """
from typing import ClassVar, Literal
from actbench.model.data import CaseData, OutcomeData
from actbench.report.kinds import Kind
from actbench.model.records import Failure, Migrations, Record
from actbench.report.tables import fill
from actbench.report.tables.values import Column

class Brew(CaseData):
    name: str

class Cups(OutcomeData):
    kind: Literal["brewed"] = "brewed"
    cups: int

class Brewed(Record[Brew, Cups | Failure]):
    migrations: ClassVar[Migrations] = {}

COLUMNS = (
    Column("tea", "Tea", "text", lambda record: record.case.name),
    Column("cups", "Cups", "count", lambda record: record.outcome.cups),
)
MINE = Kind("mine", Brewed, lambda records, title: (fill(title, COLUMNS, records),))
""",
    "theirs_broken": 'raise RuntimeError("broken at import")',
}
BREWED = {
    "schema_version": 1,
    "recipe": "tea",
    "case": {"name": "assam"},
    "outcome": {"kind": "brewed", "cups": 3},
    "machine": {"name": "kettle", "system": "Linux", "processor": "x", "cores": 1, "memory_bytes": 1},
    "versions": {"actbench": "0", "python": "3", "torch": "2"},
    "command": "brew",
    "recorded_at": "2026-11-26T00:00:00Z",
}


@pytest.fixture
def theirs(tmp_path: Path) -> Any:
    """Return a function that runs a command line where a stranger's package is installed."""
    return installed_in(tmp_path, ENTRIES, MODULES)


def file_of(folder: Path, name: str, **changed: Any) -> Path:
    file = folder / name
    file.write_text(json.dumps({**BREWED, **changed}, separators=(",", ":")) + "\n")
    return file


def test_help_lists_commands_behind_ours_and_tells_of_broken_ones_once(theirs: Any) -> None:
    ended = theirs("--help")
    shown = re.findall(r"^│ ([a-z]+)  ", ended.stdout, re.MULTILINE)

    assert ended.returncode == 0
    assert shown[:4] == ["run", "sweep", "measure", "fit"]
    assert shown[-3:] == ["devices", "greet", "several"]
    told = left_out(ended.stderr)
    assert {name for group, name in told if group == "commands"} == {
        *("convert", "measure", "raises", "lacking", "text", "empty", "strange", "usual"),
    }
    assert told["commands", "raises"] == "it cannot be imported: RuntimeError: broken at import"
    assert told["commands", "convert"] == f"actbench {version('actbench')} brings one of that name too, which is used"
    assert told["commands", "measure"] == "actbench has a command of that name itself"
    assert told["commands", "text"] == "theirs:TEXT is a str and no Typer"
    assert told["commands", "empty"] == "theirs:empty has no command"
    assert told["commands", "strange"] == "AssertionError: Typer currently doesn't support Union types"
    assert told["commands", "usual"] == "usual= names --nothing, which is not an option of usual"
    assert "no_such_name" in told["commands", "lacking"]


@pytest.mark.parametrize(
    ("arguments", "said"), [(("greet", "you", "--loud"), "hello you !"), (("several", "two"), "two")]
)
def test_a_command_of_a_package_runs_and_others_are_not_looked_at(theirs: Any, arguments: Any, said: str) -> None:
    ended = theirs(*arguments)

    assert (ended.returncode, ended.stdout.strip()) == (0, said)
    assert left_out(ended.stderr).keys() == {("commands", "convert")}  # as names show


def test_a_broken_command_is_no_command(theirs: Any) -> None:
    ended = theirs("raises")

    assert ended.returncode == 2
    assert "plug-in 'raises' (commands) of theirs 1.0 is left out: it cannot be imported: RuntimeError" in ended.stderr
    assert "No such command 'raises'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_records_and_exports_of_a_package(theirs: Any, tmp_path: Path) -> None:
    file_of(tmp_path, "kettle.mine.jsonl")

    ended = theirs("report", ".", "--title", "Tea", "--export-shout", "out.txt", "--export-csv", "-")

    assert ended.returncode == 0
    assert ended.stdout == "tea,cups\nassam,3\n"
    assert (tmp_path / "out.txt").read_text() == "TEA: 1"
    assert {"1 records", "written: out.txt"} <= set(ended.stderr.splitlines())
    assert "plug-in 'csv' (exports) of theirs 1.0 is left out: no flag can be --export-csv --shout" in ended.stderr
    assert theirs("report", ".", "--shout", "-").stdout == "RESULTS: 1"


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--export-fails", "out"), "actbench: --export-fails, which theirs 1.0 brings, failed: ZeroDivisionError"),
        (("--export-late", "out"), "actbench: --export-late, which theirs 1.0 brings, failed: KeyError: 'late'"),
        (("--export-picture", "-"), "actbench: -: standard output takes text, and this export is binary; name a file"),
        (("--export-nothing", "out"), "No such option: --export-nothing"),
    ],
)
def test_an_export_that_fails_is_one_message(theirs: Any, tmp_path: Path, arguments: Any, said: str) -> None:
    file_of(tmp_path, "kettle.mine.jsonl")

    ended = theirs("report", ".", *arguments)

    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_file_whose_plug_in_is_broken_names_it(theirs: Any, tmp_path: Path) -> None:
    file_of(tmp_path, "kettle.bad.jsonl")

    ended = theirs("report", "kettle.bad.jsonl")

    assert ended.returncode == 2
    assert (
        "kettle.bad.jsonl: a file that ends in .bad.jsonl holds records of the kind 'bad', and the plug-in of theirs "
        "1.0 that reads it cannot be used: it cannot be imported: RuntimeError: broken at import"
    ) in ended.stderr


@pytest.mark.parametrize("named", ["file", "folder"])
@pytest.mark.parametrize("verb", ["report", "compare"])
def test_a_file_whose_plug_in_is_missing_names_it(cli: Any, tmp_path: Path, named: str, verb: str) -> None:
    """A comparison is of sweeps: it finds none in a folder."""
    file = file_of(tmp_path, "kettle.mine.jsonl")
    place = str(file if named == "file" else tmp_path)
    missing = (
        "kettle.mine.jsonl: a file that ends in .mine.jsonl holds records of the kind 'mine', and no installed package"
    )
    naming = "holds no results file" if (verb, named) == ("compare", "folder") else missing
    cli.refused(verb, *[place] * (1 + (verb == "compare")), naming=naming)


@pytest.mark.exhaustive
def test_doctor_lists_plug_ins_and_why_some_are_left_out(theirs: Any) -> None:
    ended = theirs("doctor")
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]

    halved = next(line for line in lines if line.startswith("– Plug-ins: schemes halved, of theirs 1.0"))
    assert "is left out: it is no Scheme whose name is 'halved'" in halved
    assert "ok Plug-ins: kinds mine, of theirs 1.0" in lines
    assert "ok Plug-ins: exports html, latex, of actbench 0.1.0" in lines
    broken = next(line for line in lines if line.startswith("– Plug-ins: schemes quartered, of theirs 1.0"))
    assert "is left out: it cannot be imported: RuntimeError: broken at import" in broken
    assert broken.endswith("update or remove theirs")


def test_processes_that_a_command_starts_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("x", "nowhere:x", "actbench.schemes")
    monkeypatch.setenv(plugins.TOLD_BY, "1")

    plugins.leave_out(plugins.Plugin("x", entry), "schemes", "told by the command")
    monkeypatch.delenv(plugins.TOLD_BY)
    with pytest.warns(plugins.PluginWarning, match="'x' \\(schemes\\) of actbench is left out: told here"):
        plugins.leave_out(plugins.Plugin("x", entry), "schemes", "told here")
