"""Messages are short, whatever they repeat, and keep both ends of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actbench.errors import LONGEST_TEXT, message_of, shortened

LONG = 100_000
MOST = 6000  # characters that any command may say of its input: a message, and a frame around it


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_up_here: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("text", ["", "a short one", "w" * 400, "two words " * 400, "line\n" * 700])
def test_a_text_that_is_not_long_is_told_as_it_is(text: str) -> None:
    assert shortened(text) == text


@pytest.mark.parametrize("filling", ["x", "x ", "é", "\n", "[", "x" * 500 + " "])
def test_both_ends_of_a_long_text_are_kept(filling: str) -> None:
    found = shortened(f"begins {filling * LONG} ends")

    assert found.startswith("begins ")
    assert found.endswith(" ends")
    assert len(found) <= LONGEST_TEXT + len("…(999,999,999 more)…")


def test_what_is_left_out_of_a_word_is_counted() -> None:
    assert shortened(f"model '{'x' * LONG}' is unknown").count("x") + LONG - 400 + 2 == LONG
    assert f"({LONG + 2 - 400:,} more)" in shortened(f"model '{'x' * LONG}' is unknown")


class Hostile(Exception):
    """Its message cannot be had."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("a  message"), "ValueError: a  message"),
        (ValueError(), "ValueError"),
        (Hostile(), "Hostile: its message cannot be read (KeyboardInterrupt)"),
        (KeyError(Hostile()), "KeyError: its message cannot be read (KeyboardInterrupt)"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
    ],
)
def test_any_error_can_be_told(error: BaseException, expected: str) -> None:
    assert message_of(error) == expected


FILLINGS = ["x", "x ", "1", "-", "a/"]


@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize(
    "arguments",
    [
        ["{}"],
        ["measure", "{}"],
        ["measure", "tiny-bert@{}"],
        ["measure", "tiny-bert", "-s", "{}"],
        ["measure", "tiny-bert", "-s", "fewbit:3,functions={}"],
        ["measure", "tiny-bert", "-b", "{}"],
        ["measure", "tiny-bert", "--seed", "{}"],
        ["measure", "tiny-bert", "--dtype", "{}"],
        ["measure", "tiny-bert", "--memory-limit", "{}"],
        ["measure", "tiny-bert", "--device-profile", "{}"],
        ["measure", "tiny-bert", "-o", "{}"],
        ["measure", "tiny-bert", "--{}"],
        ["sweep", "{}.toml"],
        ["train", "{}"],
        ["report", "{}"],
        ["compare", "a", "b", "--fail-on", "{}"],
        ["schemes", "{}"],
        ["recipes", "{}"],
        ["models", "{}"],
        ["tables", "{}"],
        ["encodings", "--encoding", "{}"],
        ["encodings", "--distribution", "{}"],
    ],
    ids=" ".join,
)
def test_no_message_repeats_all_of_a_long_argument(cli: Any, arguments: list[str], place: int) -> None:
    filling = FILLINGS[(len(" ".join(arguments)) + 2 * place) % len(FILLINGS)]
    long = (filling * LONG)[:LONG]

    ended = cli(*(argument.format(long) for argument in arguments))

    assert ended.status == 2
    assert "Traceback" not in ended.err
    assert len(ended.err) + len(ended.out) < MOST


@pytest.mark.parametrize("line", ['colour = "{}"', "{} = 3", "{}", '[[scheme]]\nspec = "{}"'])
def test_no_message_repeats_all_of_a_long_value_in_a_recipe(cli: Any, tmp_path: Path, line: str) -> None:
    recipe = 'title = "t"\n[workload]\nmodel = "tiny-bert"\nbatch_size = 2\n'
    (tmp_path / "mine.toml").write_text(recipe + line.format("x" * LONG) + "\n")

    assert len(cli.refused("sweep", "mine.toml", naming="mine.toml")) < MOST
