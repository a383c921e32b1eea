"""What is kept between runs stands in the user's cache, or where only the user can write."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OURS = f"temporary/actbench-of-{os.getuid()}"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary folder; the one above it is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


@pytest.mark.parametrize(
    ("cache", "chosen", "expected"),
    [("cache", None, "cache/actbench/inductor"), ("file", None, f"{OURS}/inductor"), ("cache", "mine", "mine")],
    ids=["the user's cache", "a cache that cannot be written", "a folder of the user's own"],
)
def test_compilers_keep_what_they_make_in_the_users_cache(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, chosen: str | None, expected: str
) -> None:
    (tmp_path / "file").touch(mode=0o444)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache / "below" if cache == "file" else tmp_path / cache))
    if chosen is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / chosen))

    assert cli("--version").status == 0
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == str(tmp_path / expected)
    assert not (tmp_path / "cache").exists()


def said_by(code: str, **environment: str) -> str:
    """Return what a process says that runs some code."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


WHERE = "import os, actbench; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"


def open_to_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def link(place: Path) -> None:
    (place.parent / "elsewhere").mkdir(mode=0o700)
    place.symlink_to("elsewhere")


def of_another_user(place: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, 12345, -1)


@pytest.mark.parametrize("taken", [None, open_to_all, link, of_another_user])
def test_a_library_call_lets_compilers_keep_nothing_where_others_write(tmp_path: Path, taken: Any) -> None:
    if taken is of_another_user and os.getuid():
        pytest.skip("only root can give a folder away")
    (tmp_path / "file").touch()
    if taken is not None:
        taken(tmp_path / OURS)
    place = Path(said_by(WHERE, XDG_CACHE_HOME=str(tmp_path / "file")).strip()).parent

    assert (place == tmp_path / OURS) == (taken is None)
    assert place.parent == tmp_path / "temporary"
    assert stat.S_IMODE(place.lstat().st_mode) == 0o700
    assert place.owner() == tmp_path.owner()


NOBODY = """
import os, pwd, sys

def unknown(uid):
    raise KeyError(uid)

pwd.getpwuid = unknown
del os.environ["HOME"]
os.environ.pop("XDG_CACHE_HOME", None)
sys.argv = ["actbench", "doctor"]
from actbench.cli import main
main()
"""


@pytest.mark.exhaustive
def test_without_a_home_a_place_in_the_temporary_folder_is_named(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", NOBODY], capture_output=True, text=True)

    assert "Traceback" not in ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(f"caches and settings are in {tmp_path / OURS}") == 1
    assert stat.S_IMODE((tmp_path / OURS).stat().st_mode) == 0o700
    assert [each.name for each in tmp_path.iterdir()] == ["temporary"]
