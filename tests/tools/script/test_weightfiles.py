"""A simulated run leaves weights alone that were there before it, and follows its own, which are not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from actbench.simulator.fake import fake_mode, without_memory
from actbench.tools.script.libraries.libraries import prepared

STAYS = "Files of weights that were there before the run stay as they are: it writes no others in their place."


@pytest.fixture
def older(tmp_path: Path) -> Path:
    file = tmp_path / "last.pt"
    file.write_text("real")
    return file


@pytest.fixture
def notes(older: Path) -> Iterator[list[str]]:
    found: list[str] = []
    with without_memory(fake_mode()), prepared(found.append):
        yield found


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.empty(300, 300)}


def saved_beside(file: Path) -> Path:
    torch.save(weights(), file.with_name("new.pt"))
    return file.with_name("new.pt")


def after_unlinking(file: Path) -> None:
    file.unlink()
    saved_beside(file).rename(file)


def after_removing_the_folder(file: Path) -> None:
    shutil.rmtree(file.parent)
    torch.save(weights(), file)


def to_an_open_file(file: Path) -> None:
    with file.open("wb") as opened:
        torch.save(weights(), opened)


def after_rotation(file: Path) -> None:
    os.rename(file, file.with_name("older.pt"))
    os.rename(saved_beside(file), file)


REPLACING: dict[str, Callable[[Path], object]] = {
    "replace": lambda file: saved_beside(file).replace(file),
    "unlink and rename": after_unlinking,
    "shutil.move": lambda file: shutil.move(str(saved_beside(file)), str(file)),
    "shutil.copyfile": lambda file: shutil.copyfile(saved_beside(file), file),
    "rmtree": after_removing_the_folder,
    "an open file": to_an_open_file,
    "rotation": after_rotation,
}


@pytest.mark.parametrize("replace", REPLACING.values(), ids=REPLACING)
def test_an_older_checkpoint_stays_and_the_run_reads_its_own(
    replace: Callable[[Path], object], older: Path, notes: list[str]
) -> None:
    replace(older)

    assert [each.name for each in older.parent.iterdir()] == ["last.pt"]
    assert older.read_text() == "real"
    assert STAYS in notes
    assert torch.load(older)["w"].shape == (300, 300)


def test_a_state_without_tensors_leaves_an_older_file_too(older: Path, notes: list[str]) -> None:
    torch.save({"epoch": 3}, older)

    assert older.read_text() == "real"
    assert torch.load(older) == {"epoch": 3}
    assert notes == [STAYS]


def test_what_the_run_has_written_it_may_move_and_remove(tmp_path: Path, notes: list[str]) -> None:
    for name in ("config.json", "scheduler.pt"):
        (tmp_path / name).write_text("1")
    (tmp_path / "run").mkdir()

    os.rename(tmp_path / "scheduler.pt", tmp_path / "moved.pt")
    os.replace(tmp_path / "config.json", tmp_path / "run" / "config.json")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "moved.pt").unlink()

    assert [each.name for each in tmp_path.iterdir()] == ["last.pt"]
    assert notes == []


def test_a_file_that_was_never_saved_is_missing(tmp_path: Path, notes: list[str]) -> None:
    saved = saved_beside(tmp_path / "last.pt")
    saved.unlink()

    with pytest.raises(FileNotFoundError):
        saved.rename(tmp_path / "other.pt")
    with pytest.raises(FileNotFoundError):
        os.remove(tmp_path / "nothing.pt")
