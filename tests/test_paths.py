"""Names of files and folders that are made of other names."""

from __future__ import annotations

import errno
import os
import tomllib
from pathlib import Path

import pytest

from actbench.errors import RecipeError
from actbench.paths import file_name, read_toml, write_whole


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("roberta-base", "roberta-base"),
        ("swin_t-fewbit:3+randomized:0.2", "swin_t-fewbit-3+randomized-0.2"),
        ("org/name @ main", "org-name-main"),
        ("../my model", "my-model"),
        ("größe", "gr-e"),
        ("x" * 1000, "x" * 200),
        ("...", "unnamed"),
        ("", "unnamed"),
    ],
)
def test_any_text_becomes_the_name_of_a_file(tmp_path: Path, text: str, name: str) -> None:
    assert file_name(text) == name
    (tmp_path / name).touch()
    assert file_name(name) == name


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.json"
    write_whole(file, b"old")

    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"new")

    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert file.read_bytes() == b"old"


LONG_KEYS = {
    "bare": f"{'a.' * 30_000}b = 1",
    "quoted": f"{chr(34)}a{chr(34)}{' . a' * 30_000} = 1",
    "a table's": f"title = 'x'\n[{'a.' * 30_000}b]",
    "in an inline table": f"x = {{{'a.' * 30_000}b = 1}}",
    "behind a text": f'x = "{"a." * 50}"\n{"a." * 30_000}b = 1',
}


@pytest.mark.parametrize("text", LONG_KEYS.values(), ids=LONG_KEYS)
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(tomllib, "loads", lambda text: pytest.fail("it is parsed"))
    file = tmp_path / "mine.toml"
    file.write_text(text)

    with pytest.raises(RecipeError, match=r"^mine is nested too deeply: a key has more than 20 parts$"):
        read_toml(file, "mine", RecipeError)


def test_dots_of_texts_comments_and_numbers_are_no_parts_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    dots = "a." * 500
    file.write_text(
        f'x = "{dots}\\" {dots}"  # {dots}\ny = \'{dots}\'\nz = [{"0.1, " * 500}]\n'
        f'more = """\n{dots} "" {dots}"""\nraw = \'\'\'{dots}\n{dots}\'\'\'\na.b.c = 1\n'
    )

    found = read_toml(file, "mine", RecipeError)
    assert found["a"] == {"b": {"c": 1}}
    assert found["raw"] == f"{dots}\n{dots}"
