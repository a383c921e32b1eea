from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from actbench import store
from actbench.errors import StoreError
from actbench.store.lockfile import LockFile, TakenError


def test_a_sweep_leaves_no_lock_file(tmp_path: Path, make_record: Any) -> None:
    path = tmp_path / "box.jsonl"
    with store.Store.open_for_sweep(path) as opened:
        opened.append(make_record())
        assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(RuntimeError), store.Store.open_for_sweep(path):
        raise RuntimeError

    assert list(tmp_path.iterdir()) == [path]


def test_who_is_refused_leaves_the_lock_to_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = LockFile(path)
    holder.acquire()
    for _ in range(2):
        other = LockFile(path)
        with pytest.raises(TakenError) as taken:
            other.acquire()
        other.release()
        assert taken.value.holder == os.getpid()
        assert path.exists()
    holder.release()
    other.acquire()
    other.release()

    assert not path.exists()


def test_a_lock_on_a_file_that_its_holder_took_away_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    holder, waiter, third = LockFile(path), LockFile(path), LockFile(path)
    holder.acquire()
    flock = fcntl.flock

    def after_the_holder(descriptor: int, how: int) -> None:
        """Lock only after the file was opened and its holder let go."""
        holder.release()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_the_holder)
    waiter.acquire()

    assert path.read_text() == f"{os.getpid()}\n"
    with pytest.raises(TakenError):
        third.acquire()


def _count(folder: Path, rounds: int) -> None:
    """Add to a number that is only right if one process at a time does so."""
    number = folder / "number"
    for _ in range(rounds):
        lock = LockFile(folder / "lock")
        while True:
            try:
                lock.acquire()
                break
            except TakenError:
                continue
        value = int(number.read_text())
        number.write_text(str(value + 1))
        lock.release()


def test_one_process_at_a_time_holds_it(tmp_path: Path) -> None:
    (tmp_path / "number").write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count, args=(tmp_path, 100)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)

    assert [process.exitcode for process in processes] == [0] * 3
    assert (tmp_path / "number").read_text() == "300"
    assert not (tmp_path / "lock").exists()


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / "box.jsonl.lock").symlink_to(tmp_path / "precious")

    with pytest.raises(StoreError, match=r"box\.jsonl\.lock"), store.Store.open_for_sweep(tmp_path / "box.jsonl"):
        pass
    assert (tmp_path / "precious").read_text() == "text"
