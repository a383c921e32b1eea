"""Names of files and folders that are made of other names."""

from __future__ import annotations

from pathlib import Path

import pytest

from actbench.paths import file_name


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
