from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from actbench.errors import StoreError
from actbench.model.measured import MeasuredRecord
from actbench.report.linefile import locked
from actbench.report.store import Store


def test_a_sweep_leaves_no_lock_file(tmp_path: Path, make_record: Any) -> None:
    path = tmp_path / "box.jsonl"
    with Store.opened(path, MeasuredRecord) as opened:
        opened.append(make_record())
        assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(RuntimeError), Store.opened(path, MeasuredRecord):
        raise RuntimeError

    assert list(tmp_path.iterdir()) == [path]


def _count(folder: Path, rounds: int) -> None:
    """Add to a number that is only right if one process at a time does so."""
    number = folder / "number"
    for _ in range(rounds):
        while True:
            try:
                with locked(folder / "box.jsonl"):
                    number.write_text(str(int(number.read_text()) + 1))
                break
            except StoreError:
                continue


def test_one_process_at_a_time_holds_it(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count, args=(tmp_path, 30)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)

    assert [process.exitcode for process in processes] == [0] * 3
    assert (tmp_path / "number").read_text() == "90"
    assert not (tmp_path / "box.jsonl.lock").exists()


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / "box.jsonl.lock").symlink_to(tmp_path / "precious")

    with (
        pytest.raises(StoreError, match=r"box\.jsonl\.lock"),
        Store.opened(tmp_path / "box.jsonl", MeasuredRecord),
    ):
        pass
    assert (tmp_path / "precious").read_text() == "text"
