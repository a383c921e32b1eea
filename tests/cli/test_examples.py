"""Every command in the README, on a page or in a ``--help`` is one: verbs, flags, schemes, profiles, names, targets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from actbench import schemes
from actbench.cli.app import app
from actbench.errors import ActbenchError
from actbench.experiments.recipes import base
from actbench.measuring.meters import profiles
from actbench.workloads.names import parse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP: Any = typer.main.get_command(app)
_Gap: Any = (typer._click.exceptions.MissingParameter, typer._click.exceptions.BadOptionUsage)
_VERB = re.compile(r"actbench [a-z][a-z-]*\b")
_OPEN = re.compile(r"…|\.\.\.|\b[A-Z]{3,}\b(?!\.)|[<>\[\]]")
"""What stands in a form, not in a command: a gap, or a word for another."""


def commands_in(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the commands in code blocks and in inline code of Markdown, and whether they are the latter: mentions."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if line.startswith(("actbench ", "make ")):
            yield line, False
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", prose):
        command = " ".join(code.split())
        if command.startswith("make ") or (_VERB.match(command) and not _OPEN.search(command)):
            yield command, True


def commands_of_help() -> Iterator[tuple[str, str, bool]]:
    for name, verb in GROUP.commands.items():
        for paragraph in (verb.help or "").split("\n\n"):
            line = " ".join(paragraph.split())
            if line.startswith("actbench "):
                yield f"{name} --help", line, False


WRITTEN = sorted(
    {(page.name, *found) for page in PAGES for found in commands_in(page.read_text(encoding="utf-8"))}
    | set(commands_of_help())
)


def arguments_of(line: str) -> list[str]:
    """Return the words of a command up to a pipe, a redirection, another command or a comment."""
    words = shlex.split(line, comments=True)
    end = next((place for place, word in enumerate(words) if word in ("|", ">", "&&", ";")), len(words))
    return words[:end]


def check(line: str, *, is_mention: bool = False) -> None:
    """Raise where a command names something that there is not; a mention may leave out arguments."""
    program, *words = arguments_of(line)
    if program == "make":
        targets = re.findall(r"^([a-z]+)(?: [a-z]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        known = {*targets, "test", "slow"}
        assert all(word in known for word in words if "=" not in word), line
        return
    if words[0].startswith("-"):
        GROUP.make_context("actbench", words, resilient_parsing=True)
        return
    assert words[0] in GROUP.commands, f"{line}: there is no verb {words[0]!r}"
    if "--help" in words[1:]:
        return
    given = _parsed(words, is_mention=is_mention)
    for text in _texts(given.get("scheme")):
        if ".py:" not in text:  # a file of the user's
            schemes.build(text)
    for profile in _texts(given.get("device_profile")):
        if not profile.endswith(".toml"):
            profiles.get(profile)
    for name in (*_texts(given.get("target")), *_texts(given.get("model"))):
        check_name(name)


def _parsed(words: list[str], *, is_mention: bool) -> dict[str, Any]:
    verb, parent = GROUP.commands[words[0]], GROUP.make_context("actbench", list(words))
    try:
        return dict(verb.make_context(words[0], words[1:], parent=parent).params)
    except _Gap:
        if not is_mention:
            raise
        return dict(verb.make_context(words[0], [*words[1:], "./x"], parent=parent, resilient_parsing=True).params)


def check_name(name: str) -> None:
    """Raise where a plain name is that of no model and no recipe; files and names of the hub are the user's."""
    if name.endswith((".toml", ".jsonl")) or any(mark in name.split("@")[0] for mark in "/:"):
        return
    if name not in {*base.SWEEPS.names(), *base.TRAININGS.names()}:
        parse(name)


def _texts(value: Any) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(map(str, value))


def test_there_are_commands_to_check() -> None:
    assert len(WRITTEN) > 100
    assert {place for place, _, _ in WRITTEN} >= {"README.md", "fit --help", "sweep --help", "fit.md"}


@pytest.mark.parametrize(("place", "line", "is_mention"), WRITTEN, ids=str)
def test_a_command_that_is_written_somewhere_is_one(place: str, line: str, is_mention: bool) -> None:
    try:
        check(line, is_mention=is_mention)
    except ActbenchError as error:
        pytest.fail(f"{place}: {line}: {error}")


@pytest.mark.parametrize(
    "line",
    [
        "actbench fit llama-3.1-8b --device-profile h100 --batch-size 4",
        "actbench measure roberta-base -s fewbyt:3",
        "actbench sweep quickstrat",
        "make everything",
    ],
)
def test_a_command_that_names_what_is_not_there_is_found(line: str) -> None:
    with pytest.raises((ActbenchError, AssertionError)):
        check(line)
