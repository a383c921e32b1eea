"""What a killed process leaves is removed by the next command, and nothing else is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actbench import tempfiles
from actbench.report.render.exports import export
from actbench.tempfiles import sweep, temporary_folder

FOLDER = """
    with temporary_folder() as folder:
        (folder / "kept.jsonl").write_text("a row")
        end()
"""
CONVERSION = """
    with staged(Path("model"), replaceable=False) as stage:
        (stage / "model.safetensors").write_text("weights")
        end()
"""
EXPORT = """
    def rows():
        yield "a row"
        end()

    export({Path("rows.csv"): rows()})
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
WAITS = "print('ready', flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which is the temporary folder too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def started(code: str, end: str) -> subprocess.Popen[str]:
    imports = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom actbench.tempfiles import temporary_folder\n"
        "from actbench.report.render.exports import export\n"
    )
    staging = "from actbench.tools.convert.savedmodel import staged\n" if "staged" in code else ""
    program = f"{imports}{staging}def end(): {end}\n{textwrap.dedent(code)}"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True)


def work(code: str) -> None:
    """Do here to its end what a process was killed in."""
    if code == FOLDER:
        with temporary_folder():
            pass
    elif code == EXPORT:
        export({Path("others.csv"): "a row"})
    else:
        from actbench.tools.convert.savedmodel import staged

        with staged(Path("other"), replaceable=False):
            pass


CASES = [
    pytest.param(FOLDER, id="a temporary folder"),
    pytest.param(EXPORT, id="an export"),
    pytest.param(CONVERSION, id="a conversion", marks=pytest.mark.slow),  # which imports torch
]


@pytest.mark.parametrize("code", CASES)
def test_what_a_killed_process_leaves_is_removed_by_the_next(folder: Path, code: str) -> None:
    process = started(code, KILLED)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    [left] = folder.iterdir()

    work(code)
    assert not left.exists()
    assert [each.name for each in folder.iterdir()] in ([], ["others.csv"], ["other"])


@contextmanager
def alive(code: str) -> Iterator[None]:
    """Hold a process that is in the middle of its work."""
    process = started(code, WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield
    process.communicate()


@pytest.mark.parametrize("code", CASES)
def test_what_a_process_works_on_is_left_alone(folder: Path, code: str) -> None:
    with alive(code):
        [left] = folder.iterdir()
        work(code)
        assert left.exists()
    sweep(folder)

    assert not left.exists()


def test_only_what_this_user_left_on_this_machine_is_removed(folder: Path) -> None:
    process = started(FOLDER, KILLED)
    process.communicate()
    [left] = folder.iterdir()
    others = {
        "of another machine": left.with_name(left.name.replace(tempfiles._start(), "0" * 8)),
        "not locked at all": left.with_name(left.name[:-1] + ("0" if left.name[-1] != "0" else "1")),
        "of a user": folder / "actbench-mine",
        "of torch": folder / f"actbench-of-{os.getuid()}",
    }
    for each in others.values():
        shutil.copytree(left, each)
    (others["not locked at all"] / ".lock").unlink()
    (folder / "linked").mkdir()
    (folder / "linked" / ".lock").touch()
    link = left.with_name(f"actbench-{tempfiles._start()}-{'a' * 8}")
    link.symlink_to("linked")
    if os.getuid() == 0:
        foreign = shutil.copytree(left, left.with_name(f"actbench-{tempfiles._start()}-{'b' * 8}"))
        os.chown(foreign, 12345, -1)
        others["of another user"] = Path(foreign)
    sweep(folder)

    assert not left.exists()
    assert {name: each.is_dir() for name, each in others.items()} == dict.fromkeys(others, True)
    assert link.is_symlink()
    assert (folder / "linked" / ".lock").exists()


def test_without_locks_nothing_is_marked_as_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with temporary_folder() as made:
        assert list(made.iterdir()) == []
        sweep(folder)
        assert made.is_dir()
    export({folder / "table.md": "a table"})

    assert [each.name for each in folder.iterdir()] == ["table.md"]


def test_files_have_the_mode_that_new_files_have(folder: Path) -> None:
    umask = os.umask(0o027)
    try:
        export({folder / "table.md": "a table"})
    finally:
        os.umask(umask)

    assert (folder / "table.md").stat().st_mode & 0o777 == 0o640
