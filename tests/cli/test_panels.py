"""The help page of a verb: flags in panels, the common ones first."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.main import get_command

from actbench.cli.app import app, verbs_of
from actbench.cli.exports import formats_plugged
from actbench.cli.panels import PANELS, WITHOUT_PANEL

VERBS = ["run", "measure", "sweep", "fit", "train", "convert"]
WITH_A_SCREEN = ["run", "measure", "sweep", "fit", "convert", "report", "compare"]
LINES_OF_A_SCREEN = 60


def panels_of(cli: Any, verb: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return the flags of each panel of a verb's help page, in their order."""
    monkeypatch.setenv("COLUMNS", "160")
    ended = cli(verb, "--help-all" if verb in WITH_A_SCREEN else "--help")
    assert ended.status == 0
    found: dict[str, list[str]] = {}
    for line in ended.out.splitlines():
        if title := re.match(r"╭─ ([\w ]+) ─", line):
            found[title[1]] = []
        elif flag := re.match(r"│[ *]{1,6}(--[a-z-]+)", line):
            found[next(reversed(found))].append(flag[1])
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_stands_in_its_panel_in_its_order(cli: Any, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = panels_of(cli, verb, monkeypatch)

    assert found.pop("Options") == ["--help", *(["--help-all"] if verb in WITH_A_SCREEN else [])]
    assert found.pop("Arguments") == []
    assert list(found) == [title for title in PANELS if title in found]
    for title, flags in found.items():
        assert flags == [name for name in PANELS[title].split() if name in flags]


@pytest.mark.parametrize("verb", WITH_A_SCREEN)
def test_help_is_a_screen_of_the_usual_options_and_says_where_the_others_are(
    cli: Any, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {flag for flags in panels_of(cli, verb, monkeypatch).values() for flag in flags}
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli(verb, "--help").out.splitlines()
    shown = {found[1] for line in lines if (found := re.match(r"│[ *]{1,6}(--[a-z-]+)", line))}

    assert shown == {*verbs_of(app)[verb].usual, "--help", "--help-all"} < whole
    assert len(lines) <= LINES_OF_A_SCREEN
    assert f"{len(whole - shown)} more options: actbench {verb} --help-all" in " ".join(lines)


def test_no_panel_names_a_flag_that_no_verb_has(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {flag for verb in VERBS for flags in panels_of(cli, verb, monkeypatch).values() for flag in flags}

    assert {name for text in PANELS.values() for name in text.split()} <= shown


def test_every_flag_of_a_verb_that_writes_tables_is_known_as_taken() -> None:
    verbs: Any = get_command(app)
    parameters = [verbs.get_command(None, name).params for name in verbs.list_commands(None)]
    writing = [found for found in parameters if "export_csv" in {each.name for each in found}]
    flags = {flag for found in writing for each in found for flag in (*each.opts, *each.secondary_opts)}
    aliases = {made.also for _, made in formats_plugged().values()}

    assert len(writing) > 5
    assert {flag for flag in flags if flag.startswith("--")} <= {
        *(name for text in PANELS.values() for name in text.split()),
        *WITHOUT_PANEL.split(),
        *aliases,
    }


@pytest.mark.parametrize(
    ("flag", "value", "naming"),
    [
        ("--steps", "0", "0 is not at least 1"),
        ("--steps", "1.5", "'1.5' is not a whole number"),
        ("--seed", "-1", "-1 is not at least 0"),
        ("--timeout", "nan", "nan is not at least 1"),
        ("--timeout", "soon", "'soon' is not a number"),
    ],
)
def test_a_number_out_of_its_range_is_told_with_the_range(cli: Any, flag: str, value: str, naming: str) -> None:
    cli.refused("measure", "tiny-bert", flag, value, naming=naming)
