"""What compilers keep between runs stands in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("cache", "chosen", "expected"),
    [("cache", None, "cache/actbench/inductor"), ("file", None, None), ("cache", "mine", "mine")],
    ids=["the user's cache", "a cache that cannot be written", "a folder of the user's own"],
)
def test_compilers_keep_what_they_make_in_the_users_cache(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, chosen: str | None, expected: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch(mode=0o444)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache / "below" if cache == "file" else tmp_path / cache))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "" if chosen is None else str(tmp_path / chosen))
    if chosen is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")

    assert cli("--version").status == 0
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == (None if expected is None else str(tmp_path / expected))
    assert not (tmp_path / "cache").exists()
