from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn

from actbench import convert
from actbench.errors import StoreError
from actbench.tools.convert import folders, savedmodel
from actbench.tools.convert.folders import save_converted


class DiskUsage(NamedTuple):
    free: int


def own() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def test_a_folder_that_is_not_empty_is_never_overwritten(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for force in (False, True):
        with pytest.raises(StoreError, match="not empty"):
            save_converted(convert(own(), "fewbit:3"), tmp_path, force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_taken(tmp_path: Path):
    assert save_converted(convert(own(), "fewbit:3"), tmp_path / "made" / "here").is_dir()
    (tmp_path / "empty").mkdir()
    assert (save_converted(convert(own(), "fewbit:3"), tmp_path / "empty") / "actbench.json").is_file()


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "model").write_text("")
    with pytest.raises(StoreError, match="is a file"):
        save_converted(convert(own(), "fewbit:3"), tmp_path / "model", force=True)
    with pytest.raises(StoreError, match="cannot be written"):
        save_converted(convert(own(), "fewbit:3"), tmp_path / "model" / "inside")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_save_leaves_nothing_and_loses_nothing(tmp_path: Path, monkeypatch, problem: Any, force: bool):
    folder = tmp_path / "model"
    before: list[bytes] = []
    if force:
        save_converted(convert(own(), "fewbit:3"), folder)
        before = [path.read_bytes() for path in sorted(folder.iterdir())]

    def fail(*_: Any) -> None:
        raise problem

    monkeypatch.setattr(folders.savedmodel, "write", fail)
    with pytest.raises((KeyboardInterrupt, StoreError)):
        save_converted(convert(own(), "fewbit:2"), folder, force=force)
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if force else [])
    assert [path.read_bytes() for path in sorted(folder.glob("*"))] == before


def test_a_failing_last_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch):
    folder = save_converted(convert(own(), "fewbit:3"), tmp_path / "model")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        save_converted(convert(own(), "fewbit:2"), folder, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert json.loads((folder / "actbench.json").read_text())["scheme"] == "fewbit:3"


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(savedmodel.shutil, "disk_usage", lambda _: DiskUsage(free=1024))
    with pytest.raises(StoreError, match=r"needs 4\.\d\d MiB and its disk has 1\.00 KiB free"):
        save_converted(convert(own(), "fewbit:3"), tmp_path / "a" / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that nobody may write to")
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(savedmodel.shutil, "disk_usage", lambda _: DiskUsage(free=10**9))
    with pytest.raises(StoreError, match="/proc/model cannot be written"):
        save_converted(convert(own(), "fewbit:3"), "/proc/model")
