"""Every command in the README, on a page or in a ``--help`` runs, and ends well.

What takes long is made up: measuring, simulating, training, timing, converting large models. All before and after it is
real: flags, specifications, models, recipes, files, tables and exports. Files that commands name are in the folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from actbench.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUP: Any = typer.main.get_command(app)
_Gap: Any = (typer._click.exceptions.MissingParameter, typer._click.exceptions.BadOptionUsage)
_VERB = re.compile(r"actbench [a-z][a-z-]*\b")
_LAUNCHER = re.compile(r"^(?:COLUMNS=\d+ |(?:torchrun|accelerate launch) .*-m )(?=actbench )")
_OPEN = re.compile(r"…|\.\.\.|\b[A-Z]{3,}\b(?!\.)|[<>\[\]]")
"""What stands in a form, not in a command: a gap, or a word for another."""


def commands_in(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the commands in code blocks and in inline code of Markdown, and whether they are the latter: mentions."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        line = _LAUNCHER.sub("", line)
        if line.startswith(("actbench ", "make ")):
            yield line, False
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", prose):
        command = _LAUNCHER.sub("", " ".join(code.split()))
        if command.startswith("make ") or (_VERB.match(command) and not _OPEN.search(command)):
            yield command, True


def commands_of_help() -> Iterator[tuple[str, str, bool]]:
    for name in GROUP.list_commands(None):
        verb = GROUP.get_command(None, name)
        for paragraph in (verb.help or "").split("\n\n"):
            line = " ".join(paragraph.split()).removeprefix("Examples: ").removeprefix("Example: ")
            for command in line.split(" · "):
                command = _LAUNCHER.sub("", command)
                if command.startswith("actbench "):
                    yield f"{name} --help", command, False


def arguments_of(line: str) -> tuple[str, ...]:
    """Return the words of a command up to a pipe, a redirection, another command or a comment."""
    words = shlex.split(line, comments=True)
    end = next((place for place, word in enumerate(words) if word in ("|", ">", "&&", ";")), len(words))
    return tuple(words[:end])


def written() -> dict[tuple[str, ...], list[str]]:
    """Return the places of each command; one that is nothing but mentioned may leave out arguments, then it asks."""
    found = [(page.name, *each) for page in PAGES for each in commands_in(page.read_text(encoding="utf-8"))]
    places: dict[tuple[str, ...], list[str]] = {}
    for place, line, is_mention in (*found, *commands_of_help()):
        words = arguments_of(line)
        if is_mention and words[0] != "make" and _lacks_arguments(words[1:]):
            words = (*words[:2], "--help")
        places.setdefault(words, []).append(place)
    return places


def _lacks_arguments(words: tuple[str, ...]) -> bool:
    try:
        parent = GROUP.make_context("actbench", list(words))
        verb = GROUP.get_command(parent, words[0])
        assert verb is not None, f"a page mentions 'actbench {words[0]}', which is no verb"
        verb.make_context(words[0], list(words[1:]), parent=parent)
        if words == ("fit",):  # it asks for a model or a script itself
            return True
    except _Gap:
        return True
    except (KeyError, typer._click.exceptions.UsageError):
        return False
    return False


WRITTEN = written()


def run(words: tuple[str, ...], cli: Any) -> None:
    """Run a command as a shell does in the current folder; encodings are compared on few numbers."""
    program, *given = words
    if program == "make":
        targets = re.findall(r"^([a-z]+)(?: [a-z]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        known = {*targets, "test", "slow"}
        assert all(word in known for word in given if "=" not in word), words
        return
    given = [name for word in given for name in (sorted(map(str, Path().glob(word))) if "*" in word else ()) or [word]]
    if given[0] == "encodings":
        given += ["--elements", "64"]
    if given[0] == "calibrate":
        Path("here.toml").unlink()  # which it writes
    if given[1:2] == ["mine.toml"]:  # as its page says to begin one
        recipe = {"sweep": "quickstart", "train": "digits"}[given[0]]
        Path("mine.toml").write_text(cli("recipes", recipe).out)
    ended = cli(*given)
    assert ended.status == 0, ended.err
    assert ended.out


def test_there_are_commands_to_run() -> None:
    assert len(WRITTEN) > 120
    places = {place for each in WRITTEN.values() for place in each}
    assert places >= {"README.md", "fit --help", "sweep --help", "fit.md", "torchrun.md", "schemes --help"}


def quick_or_slow(words: tuple[str, ...], places: list[str]) -> Any:
    """Return a command for a test: README's are fast, or slow if they take seconds; others are sampled."""
    takes_seconds = words[1:2] in [("fit",), ("sweep",), ("train",)] and "--help" not in words
    mark: Any = pytest.mark.sampled(fast=20, slow=20)
    if takes_seconds:
        mark = pytest.mark.slow if "README.md" in places else pytest.mark.exhaustive
    elif "README.md" in places:
        mark = ()
    return pytest.param(words, places, marks=mark, id=" ".join(words))


@pytest.mark.usefixtures("users_folder", "made_up")
@pytest.mark.parametrize(("words", "places"), [quick_or_slow(*each) for each in WRITTEN.items()])
def test_a_command_that_is_written_somewhere_ends_well(words: tuple[str, ...], places: list[str], cli: Any) -> None:
    run(words, cli)


CONVERTED = [words for words in WRITTEN if words[1:2] == ("convert",) and "--help" not in words]


@pytest.mark.sampled(slow=3)
@pytest.mark.usefixtures("users_folder", "tasks_here")
@pytest.mark.parametrize("words", CONVERTED, ids=" ".join)
def test_a_conversion_that_is_written_somewhere_ends_well(words: tuple[str, ...], cli: Any) -> None:
    dry = () if "--dry-run" in words or "--output" in words else ("--dry-run",)
    run((*words, *dry), cli)


@pytest.mark.parametrize(
    "line",
    [
        "actbench fit llama-3.1-8b --device-profile h1000 --batch-size 4",
        "actbench measure roberta-base -s fewbyt:3",
        "actbench sweep quickstrat",
        "make everything",
    ],
)
@pytest.mark.usefixtures("users_folder", "made_up")
def test_a_command_that_names_what_is_not_there_is_found(line: str, cli: Any) -> None:
    with pytest.raises(AssertionError):
        run(arguments_of(line), cli)
