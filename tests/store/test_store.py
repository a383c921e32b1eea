from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actbench import store
from actbench.errors import StoreError
from actbench.records import Failure, Measurement, Record
from actbench.store import Store, lines

MakeRecord = Callable[..., Record]
DATA = Path(__file__).parents[1] / "data"


def write(path: Path, *records: Record) -> bytes:
    with Store.open_for_sweep(path) as opened:
        for record in records:
            opened.append(record)
    return path.read_bytes()


def fail_to_open(path: Path) -> str:
    """Return the message with which a file is refused for a sweep."""
    with pytest.raises(StoreError) as caught, Store.open_for_sweep(path):
        pass
    return str(caught.value)


def test_what_is_appended_is_read_back_in_order(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "made" / "box.jsonl"
    records = (make_record(), make_record("fewbit:3", label="µ"), make_record("checkpoint", failure="too much"))
    content = write(path, *records)

    assert store.read(path).records == records
    assert store.read(path).notice is None
    assert content.count(b"\n") == len(records)


def test_a_sweep_goes_on_where_the_one_before_ended(tmp_path: Path, make_record: MakeRecord) -> None:
    path, first, second = tmp_path / "box.jsonl", make_record(), make_record("fewbit:3")
    before = write(path, first)
    with Store.open_for_sweep(path) as opened:
        assert opened.done(first.case.key())
        assert not opened.done(second.case.key())
        opened.append(second)
        assert opened.done(second.case.key())
        assert opened.records == (first, second)

    assert path.read_bytes().startswith(before)


def test_a_failed_case_is_done(tmp_path: Path, make_record: MakeRecord) -> None:
    record = make_record(failure="needs 3 GiB")
    write(tmp_path / "box.jsonl", record)

    with Store.open_for_sweep(tmp_path / "box.jsonl") as opened:
        assert opened.done(record.case.key())


def test_a_case_that_was_unavailable_is_tried_again(tmp_path: Path, make_record: MakeRecord) -> None:
    path, record = tmp_path / "box.jsonl", make_record(meter="cuda")
    lacking = record.model_copy(update={"outcome": Failure(reason="unavailable", message="there is no GPU")})
    write(path, lacking)

    with Store.open_for_sweep(path) as opened:
        assert not opened.done(record.case.key())
        opened.append(lacking)
        assert not opened.done(record.case.key())
        opened.append(record)
        assert opened.done(record.case.key())
        assert opened.records == (record,)


def test_in_a_shared_file_a_case_is_done_by_this_machine_only(tmp_path: Path, make_record: MakeRecord) -> None:
    path, record = tmp_path / "all.jsonl", make_record(machine="there")
    write(path, record)

    with Store.open_for_sweep(path, machine="here") as opened:
        assert not opened.done(record.case.key())
        opened.append(make_record(machine="here"))
        assert opened.done(record.case.key())
        assert len(opened.records) == 2


def test_of_several_records_of_a_case_the_last_counts_and_all_stay(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    old, other, new = make_record(peak_bytes=1), make_record("fewbit:3"), make_record(peak_bytes=2)
    content = write(path, old, other, new)

    assert store.read(path).records == (new, other)
    assert content.count(b"\n") == 3


def test_the_same_case_on_two_machines_is_two_records(tmp_path: Path, make_record: MakeRecord) -> None:
    here, there = make_record(machine="here"), make_record(machine="there")
    write(tmp_path / "a.jsonl", here)
    write(tmp_path / "b.jsonl", there)

    assert store.read_all([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]) == ([here, there], [])


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of small files are slow on a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def test_a_file_cut_at_any_byte_loses_no_earlier_row_and_can_be_added_to(
    quick_folder: Path, make_record: MakeRecord
) -> None:
    path, records, added = quick_folder / "box.jsonl", [make_record(label="µ"), make_record("a")], make_record("b")
    content = write(path, *records)
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]

    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        kept = records[: sum(length >= end - 1 for end in ends)]  # a line is whole without its newline, too
        torn = length not in {0, *ends, *(end - 1 for end in ends)}
        found = store.read(path)
        assert (list(found.records), found.notice is not None) == (kept, torn), f"cut at {length}"
        assert path.stat().st_size == length, "reading changes nothing"

        file = lines.LineFile(path, found.whole_bytes, found.file_bytes)
        file.append(added.model_dump_json().encode())
        found = store.read(path)
        assert (list(found.records), found.notice) == ([*kept, added], None), f"cut at {length}"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 400)), max_size=4))
def test_sweeps_killed_in_writing_end_with_the_rows_of_an_undisturbed_one(
    quick_folder: Path, make_record: MakeRecord, kills: list[tuple[int, int]]
) -> None:
    path = quick_folder / "box.jsonl"
    path.unlink(missing_ok=True)
    planned = [make_record(f"fewbit:{bits}") for bits in range(1, 9)]

    def sweep(most: int) -> None:
        with Store.open_for_sweep(path) as opened:
            for record in [record for record in planned if not opened.done(record.case.key())][:most]:
                opened.append(record)

    for rows, cut_off in kills:
        sweep(rows)
        end = path.stat().st_size
        os.truncate(path, max(0, end - cut_off))
    sweep(len(planned))

    assert list(store.read(path).records) == planned
    assert len(path.read_bytes().splitlines()) == len(planned)  # the last newline may be what was cut off


def test_a_half_written_line_is_noticed_and_cut_off(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    content = write(path, make_record(), make_record("fewbit:3"))
    path.write_bytes(content[:-20])

    with Store.open_for_sweep(path) as opened:
        assert opened.notice is not None
        assert "half-written" in opened.notice
        assert len(opened.records) == 1
        opened.append(make_record("fewbit:3"))

    assert path.read_bytes() == content


def test_a_last_line_that_a_crash_of_the_machine_left_as_zeros_is_cut_off(
    tmp_path: Path, make_record: MakeRecord
) -> None:
    path = tmp_path / "box.jsonl"
    content = write(path, make_record())
    path.write_bytes(content + b'{"schema_version":1,"rec' + bytes(50) + b"\n")

    assert store.read(path).records == (make_record(),)
    assert write(path, make_record("fewbit:3")).startswith(content + b'{"schema_version":1,"recipe"')


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
    ],
)
def test_lines_of_other_versions_are_told(tmp_path: Path, make_record: MakeRecord, version: object, told: str) -> None:
    path = tmp_path / "box.jsonl"
    data = json.loads(write(path, make_record())) | {"schema_version": version}
    path.write_text(json.dumps(data) + "\n")

    assert fail_to_open(path).startswith(f"{path}:1: ")
    assert told in fail_to_open(path)


def test_an_older_version_is_migrated_step_by_step(make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    old = json.loads(record.model_dump_json()) | {"schema_version": -1}
    old["question"] = old.pop("recipe")
    monkeypatch.setitem(lines.MIGRATIONS, -1, lambda data: data | {"schema_version": 0})

    def rename(data: dict[str, object]) -> dict[str, object]:
        return {"recipe" if key == "question" else key: value for key, value in data.items()} | {"schema_version": 1}

    monkeypatch.setitem(lines.MIGRATIONS, 0, rename)

    assert lines.parse(json.dumps(old).encode(), "old:1") == record


def test_results_of_schema_1_are_read_for_ever() -> None:
    exact, fewbit, measured, failed = store.read(DATA / "results-schema-1.jsonl").records

    assert exact.machine.gpu == "NVIDIA H200"
    assert isinstance(exact.outcome, Measurement)
    assert exact.outcome.largest_batch_search is not None
    assert (exact.outcome.largest_batch, exact.outcome.largest_batch_search.next_outcome) == (150, "over-limit")
    assert (fewbit.label, fewbit.published[0].value) == ("3-bit GELU", 0.138)
    assert isinstance(fewbit.outcome, Measurement)
    assert (fewbit.outcome.sites[0].becomes, fewbit.outcome.unreached[0].path) == ("3-bit GELU", "classifier")
    assert isinstance(measured.outcome, Measurement)
    assert math.isnan(measured.outcome.gradient_error or 0)
    assert measured.outcome.step_seconds == (0.5, 0.52, 0.51)
    assert isinstance(failed.outcome, Failure)
    assert failed.outcome.peak_bytes == 44 * 1024**3


def _hold(path: Path, record: Record, held: Event, release: Event) -> None:
    with Store.open_for_sweep(path) as opened:
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
        assert store.read(path).records == (make_record(),), "reading needs no lock"
    finally:
        release.set()
        other.join(60)

    assert other.exitcode == 0
    write(path, make_record("fewbit:3"))
    assert len(store.read(path).records) == 2


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
    assert len(store.read(path).records) == 2


def test_the_file_is_free_again_after_an_error(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    with pytest.raises(RuntimeError), Store.open_for_sweep(path):
        raise RuntimeError

    write(path, make_record())


NO_ROOM = """
import resource, signal, sys
from pathlib import Path
from actbench import store
from actbench.errors import StoreError

path = Path(sys.argv[1])
record = store.read(path).records[0]
other = record.model_copy(update={"case": record.case.model_copy(update={"seed": 1})})
with store.Store.open_for_sweep(path) as opened:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), free[1]))
    try:
        opened.append(other)
    except StoreError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, free)
    print(path.stat().st_size, opened.done(other.case.key()))
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

    assert store.read(path).records == (make_record(), make_record(seed=1))


def test_another_writer_is_noticed(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    with Store.open_for_sweep(path) as opened:
        opened.append(make_record())
        with path.open("a") as file:
            file.write("a note of mine\n")
        with pytest.raises(StoreError, match="another program changed the file"):
            opened.append(make_record("fewbit:3"))

    assert path.read_text().endswith("}\na note of mine\n")


def test_places_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert f"{tmp_path} is a folder: name a results file in it" in fail_to_open(tmp_path)
    assert "results cannot be written there" in fail_to_open(tmp_path / "file" / "box.jsonl")
    assert "is not a file that holds results" in fail_to_open(Path(os.devnull))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    assert "results cannot be written there: Permission denied" in fail_to_open(tmp_path / "box.jsonl")


def test_a_missing_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="the results cannot be read: No such file"):
        store.read(tmp_path / "box.jsonl")


def test_results_files_are_found_in_folders_at_any_depth(tmp_path: Path) -> None:
    for name in ("b/box.jsonl", "a/box.jsonl", "a/box.md", "a/box.jsonl.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    first, second = tmp_path / "a" / "box.jsonl", tmp_path / "b" / "box.jsonl"

    assert store.files_in([tmp_path]) == [first, second]
    assert store.files_in([second, tmp_path]) == [second, first]
    with pytest.raises(StoreError, match="empty holds no results file"):
        store.files_in([tmp_path / "empty"])


def test_results_stand_by_recipe_and_machine() -> None:
    assert store.results_path(Path("results"), "quickstart", "box") == Path("results/quickstart/box.jsonl")
    assert store.results_path(Path("r"), "hf:org/name", "../a b") == Path("r/hf-org-name/a-b.jsonl")
    assert store.results_path(Path("r"), "...", "") == Path("r/unnamed/unnamed.jsonl")
