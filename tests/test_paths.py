"""Names of files and folders that are made of other names."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from actbench.paths import file_name, write_whole


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
