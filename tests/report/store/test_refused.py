from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from actbench.errors import StoreError
from actbench.model.measured import MeasuredRecord
from actbench.report import lines, store
from actbench.report.store import Store

MakeRecord = Callable[..., MeasuredRecord]


def write(path: Path, *records: MeasuredRecord) -> bytes:
    with Store.opened(path, MeasuredRecord) as opened:
        for record in records:
            opened.append(record)
    return path.read_bytes()


def fail_to_open(path: Path) -> str:
    """Return the message with which a file is refused for a sweep."""
    with pytest.raises(StoreError) as caught, Store.opened(path, MeasuredRecord):
        pass
    return str(caught.value)


NO_RESULTS = {
    "a text": b"shopping list",
    "a text with a newline": b"shopping list\n",
    "CSV": b"model,peak\nresnet50,3\n",
    "another JSON": b'{"models": []}\n',
    "a JSON list": b"[1, 2]\n",
    "a number": b"3",
    "a pickle": pickle.dumps({"weights": [1.0]}),
    "deep JSON": b"[" * 100_000,
    "no version": b'{"recipe": "x"}\n',
}


@pytest.mark.parametrize("content", NO_RESULTS.values(), ids=NO_RESULTS)
def test_a_file_that_holds_no_results_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(content)

    assert "this is not a record of actbench" in fail_to_open(path)
    assert path.read_bytes() == content


def test_a_broken_line_is_told_with_its_number(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    content = write(path, make_record(), make_record("a"), make_record("b"))
    first, second, third = content.splitlines(keepends=True)
    path.write_bytes(first + second[:50] + b"\n" + third)

    message = fail_to_open(path)

    assert message.startswith(f"{path}:2: the line is broken (not JSON). Remove it")


DAMAGED = {
    "a typo in the last row": (lambda content: content[:-30] + b"!" + content[-29:], "the line is broken"),
    "a typo in the last row, its newline gone": (
        lambda content: b'";'.join(content[:-1].rsplit(b'":', 1)),
        "is broken",
    ),
    "two rows joined": (lambda content: content.replace(b"}\n{", b"}{"), "two records stand on one line"),
    "two rows joined, the newline gone": (lambda content: content.replace(b"}\n{", b"}{")[:-1], "two records stand"),
    "two rows joined, the second cut": (lambda content: content.replace(b"}\n{", b"}{")[:-40], "two records stand"),
    "lines that end with CR": (lambda content: content.replace(b"\n", b"\r"), "end with a carriage return"),
    "an end of another kind": (lambda content: content[:-2] + b"\xff", "the line is broken"),
    "a last row cut short that has its newline, and blanks": (
        lambda content: content[:-20] + b"\n  ",
        "the line is broken",
    ),
    "a last row cut short that has its newline": (lambda content: content[:-20] + b"\n", "the line is broken"),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_and_left_alone(
    tmp_path: Path, make_record: MakeRecord, damage: Callable[[bytes], bytes], told: str
) -> None:
    path = tmp_path / "box.jsonl"
    damaged = damage(write(path, make_record(), make_record("fewbit:3")))
    path.write_bytes(damaged)

    assert told in fail_to_open(path)
    assert path.read_bytes() == damaged


def test_a_record_that_does_not_validate_is_told_with_its_field(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    data = json.loads(write(path, make_record()))
    data["case"]["batch_size"] = 0
    path.write_text(json.dumps(data) + "\n")

    message = fail_to_open(path)

    assert message.startswith(f"{path}:1: not a valid record: case.batch_size: ")


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (2, "written by a newer actbench (schema version 2, this one knows 1)"),
        (0, "there was never a schema version 0"),
        ("1", "it has no schema_version"),
        (True, "it has no schema_version"),
    ],
)
def test_lines_of_other_versions_are_told(tmp_path: Path, make_record: MakeRecord, version: object, told: str) -> None:
    path = tmp_path / "box.jsonl"
    data = json.loads(write(path, make_record())) | {"schema_version": version}
    path.write_text(json.dumps(data) + "\n")

    assert fail_to_open(path).startswith(f"{path}:1: ")
    assert told in fail_to_open(path)


def _hold(path: Path, record: MeasuredRecord, held: Event, release: Event) -> None:
    with Store.opened(path, MeasuredRecord) as opened:
        opened.append(record)
        held.set()
        release.wait(60)


def test_two_sweeps_do_not_write_to_one_file(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(path, make_record(), held, release))
    other.start()
    try:
        assert held.wait(60)
        messages = [fail_to_open(path), fail_to_open(path)]
        assert all(f"another actbench process (process {other.pid}) is writing there" in text for text in messages)
        assert store.read_results(path).records == (make_record(),), "reading needs no lock"
    finally:
        release.set()
        other.join(60)

    assert other.exitcode == 0
    write(path, make_record("fewbit:3"))
    assert len(store.read_results(path).records) == 2


def test_a_killed_process_does_not_keep_the_file(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    context = multiprocessing.get_context("spawn")
    held, never = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(path, make_record(), held, never))
    other.start()
    assert held.wait(60)
    other.kill()
    other.join(60)

    assert other.exitcode == -signal.SIGKILL
    write(path, make_record("fewbit:3"))
    assert len(store.read_results(path).records) == 2


def test_the_file_is_free_again_after_an_error(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    with pytest.raises(RuntimeError), Store.opened(path, MeasuredRecord):
        raise RuntimeError

    write(path, make_record())


NO_ROOM = """
import resource, signal, sys
from pathlib import Path
from actbench.report import store
from actbench.model.measured import MeasuredRecord
from actbench.errors import StoreError

path = Path(sys.argv[1])
record = store.read_results(path).records[0]
other = record.model_copy(update={"case": record.case.model_copy(update={"seed": 1})})
with store.Store.opened(path, MeasuredRecord) as opened:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), free[1]))
    try:
        opened.append(other)
    except StoreError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, free)
    print(path.stat().st_size, opened.done(other.case))
    if len(sys.argv) > 3:
        opened.append(other)
"""


def no_room(path: Path, limit: int, *then: str) -> list[str]:
    command = [sys.executable, "-c", NO_ROOM, str(path), str(limit), *then]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_line_for_which_there_is_no_room_leaves_nothing_behind(tmp_path: Path, make_record: MakeRecord) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    path = tmp_path / "box.jsonl"
    content = write(path, make_record())

    message, state = no_room(path, len(content) + 100)

    assert message.startswith(f"{path}: the record cannot be written: File too large. The records before it are safe")
    assert state == f"{len(content)} False"
    assert path.read_bytes() == content


def test_the_line_is_written_once_there_is_room(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    content = write(path, make_record())
    path.write_bytes(content + content[:70])

    no_room(path, len(content) + 100, "again")

    assert store.read_results(path).records == (make_record(), make_record(seed=1))


def test_another_writer_is_noticed(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    with Store.opened(path, MeasuredRecord) as opened:
        opened.append(make_record())
        with path.open("a") as file:
            file.write("a note of mine\n")
        with pytest.raises(StoreError, match="another program changed the file"):
            opened.append(make_record("fewbit:3"))

    assert path.read_text().endswith("}\na note of mine\n")


def test_places_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert f"{tmp_path} is a folder: name a results file in it" in fail_to_open(tmp_path)
    assert "cannot be written" in fail_to_open(tmp_path / "file" / "box.jsonl")
    assert "is not a file that holds results" in fail_to_open(Path(os.devnull))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    assert "cannot be written: Permission denied" in fail_to_open(tmp_path / "box.jsonl")


def test_a_missing_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the results cannot be read: No such file"):
        store.read_results(tmp_path / "box.jsonl")


def test_a_line_that_is_longer_than_any_record_is_refused_before_it_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LONGEST", 100_000)
    beginning = b'{"schema_version":1,"x":"'
    for name, content in {
        "no newline": beginning + b"x" * 10**7,
        "one line": beginning + b"x" * 10**7 + b'"}\n',
        "behind others": b"\n" * 3 + beginning + b"x" * 10**7 + b'"}\n{}\n',
    }.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            assert "a line has more than 97.66 KiB, and no record has" in fail_to_open(path)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 2 * 10**6


def test_a_record_that_would_be_too_long_to_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_record: MakeRecord
) -> None:
    monkeypatch.setattr(lines, "LONGEST", 100)
    path = tmp_path / "mine.jsonl"

    with Store.opened(path, MeasuredRecord) as opened, pytest.raises(StoreError, match="more than a line may have"):
        opened.append(make_record("exact"))
    assert not path.exists()
