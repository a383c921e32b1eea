from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from actbench.errors import StoreError
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Failure
from actbench.report import kinds, lines, store
from actbench.report.linefile import LineFile, torn_path
from actbench.report.store import Store

MakeRecord = Callable[..., MeasuredRecord]
DATA = Path(__file__).parents[2] / "data"


def write(path: Path, *records: MeasuredRecord) -> bytes:
    with Store.opened(path, MeasuredRecord) as opened:
        for record in records:
            opened.append(record)
    return path.read_bytes()


def test_what_is_appended_is_read_back_in_order(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "made" / "box.jsonl"
    records = (make_record(), make_record("fewbit:3", label="µ"), make_record("checkpoint", failure="too much"))
    content = write(path, *records)

    assert store.read_results(path).records == records
    assert store.read_results(path).notice is None
    assert content.count(b"\n") == len(records)


def test_a_sweep_goes_on_where_the_one_before_ended(tmp_path: Path, make_record: MakeRecord) -> None:
    path, first, second = tmp_path / "box.jsonl", make_record(), make_record("fewbit:3")
    before = write(path, first)
    with Store.opened(path, MeasuredRecord) as opened:
        assert opened.done(first.case)
        assert not opened.done(second.case)
        opened.append(second)
        assert opened.done(second.case)
        assert opened.records == (first, second)

    assert path.read_bytes().startswith(before)


def test_a_failed_case_is_done(tmp_path: Path, make_record: MakeRecord) -> None:
    record, measured = make_record(failure="needs 3 GiB"), make_record("fewbit:3")
    write(tmp_path / "box.jsonl", record, measured)

    with Store.opened(tmp_path / "box.jsonl", MeasuredRecord) as opened:
        assert opened.done(record.case)
        assert opened.failed(record.case)
        assert not opened.failed(measured.case)
        opened.append(make_record())
        assert not opened.failed(record.case)


NAMING = {
    "card.toml": {"device_profile": "card.toml"},
    "own.py": {"model": "own.py:build"},
    "folder/config.json": {"model": "./folder@num_hidden_layers=2"},
    "steps.py": {"scheme": "checkpoint+fewbit:3,functions=relu/steps.py:act/own.py:act"},
}


@pytest.mark.parametrize("name", NAMING)
def test_a_case_is_run_again_after_a_change_of_a_file_that_it_names(
    tmp_path: Path, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in NAMING:
        Path(each).parent.mkdir(exist_ok=True)
        Path(each).write_text("as it was")
    path, record, other = tmp_path / "box.jsonl", make_record(**NAMING[name]), make_record(device_profile="t4")
    write(path, record, other)

    with Store.opened(path, MeasuredRecord) as opened:
        assert opened.done(record.case)
        Path(name).write_text("changed")
        opened.append(record)  # it was measured while the file changed: what it was before counts
    for _ in range(2):
        with Store.opened(path, MeasuredRecord) as opened:
            assert opened.done(other.case)
            assert not opened.done(record.case)
    write(path, record)
    with Store.opened(path, MeasuredRecord) as opened:
        assert opened.done(record.case)


def test_older_records_count_where_their_cases_name_no_file(make_record: MakeRecord, tmp_path: Path) -> None:
    (tmp_path / "card.toml").write_text("")
    older = [make_record(device_profile=profile) for profile in ("t4", str(tmp_path / "card.toml"))]
    path = tmp_path / "box.jsonl"
    path.write_text("".join(record.model_dump_json(exclude={"files"}) + "\n" for record in older))

    with Store.opened(path, MeasuredRecord) as opened:
        assert [opened.done(record.case) for record in older] == [True, False]


def test_a_case_that_was_unavailable_is_tried_again(tmp_path: Path, make_record: MakeRecord) -> None:
    path, record = tmp_path / "box.jsonl", make_record(meter="cuda")
    lacking = record.model_copy(update={"outcome": Failure(reason="unavailable", message="there is no GPU")})
    write(path, lacking)

    with Store.opened(path, MeasuredRecord) as opened:
        assert not opened.done(record.case)
        opened.append(lacking)
        assert not opened.done(record.case)
        opened.append(record)
        assert opened.done(record.case)
        assert opened.records == (record,)


@pytest.mark.parametrize("there", [{"machine": "there"}, {"machine": "here", "gpu": "Tesla T4"}])
def test_in_a_shared_file_a_case_is_done_by_this_machine_only(
    tmp_path: Path, make_record: MakeRecord, there: dict[str, str]
) -> None:
    path, record, here = tmp_path / "all.jsonl", make_record(**there), make_record(machine="here", gpu="NVIDIA H200")
    write(path, record)

    with Store.opened(path, MeasuredRecord, machine=here.machine) as opened:
        assert not opened.done(record.case)
        opened.append(here)
        assert opened.done(record.case)
        assert len(opened.records) == 2


def test_of_several_records_of_a_case_the_last_counts_and_all_stay(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    old, other, new = make_record(peak_bytes=1), make_record("fewbit:3"), make_record(peak_bytes=2)
    content = write(path, old, other, new)

    assert store.read_results(path).records == (new, other)
    assert content.count(b"\n") == 3


def test_the_same_case_on_two_machines_is_two_records(tmp_path: Path, make_record: MakeRecord) -> None:
    here, there = make_record(machine="here"), make_record(machine="there")
    write(tmp_path / "a.jsonl", here)
    write(tmp_path / "b.jsonl", there)

    assert store.read_all([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], MeasuredRecord) == ([here, there], [])


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
        found = store.read_results(path)
        assert (list(found.records), found.notice is not None) == (kept, torn), f"cut at {length}"
        assert path.stat().st_size == length, "reading changes nothing"

        file = LineFile(path, found.whole_bytes, found.file_bytes)
        file.append(added.model_dump_json().encode())
        found = store.read_results(path)
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
        with Store.opened(path, MeasuredRecord) as opened:
            for record in [record for record in planned if not opened.done(record.case)][:most]:
                opened.append(record)

    for rows, cut_off in kills:
        sweep(rows)
        end = path.stat().st_size
        os.truncate(path, max(0, end - cut_off))
    sweep(len(planned))

    assert list(store.read_results(path).records) == planned
    assert len(path.read_bytes().splitlines()) == len(planned)  # the last newline may be what was cut off


def test_a_half_written_line_is_noticed_and_cut_off(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    content = write(path, make_record(), make_record("fewbit:3"))
    path.write_bytes(content[:-20])

    with Store.opened(path, MeasuredRecord) as opened:
        assert opened.notice is not None
        assert "half-written" in opened.notice
        assert len(opened.records) == 1
        opened.append(make_record("fewbit:3"))

    assert path.read_bytes() == content


@pytest.mark.parametrize("begun", [b"", b'{"sch', b'{"schema_version":1,"rec'])
def test_a_last_line_that_a_crash_of_the_machine_left_as_zeros_is_cut_off(
    tmp_path: Path, make_record: MakeRecord, begun: bytes
) -> None:
    path = tmp_path / "box.jsonl"
    content = write(path, make_record())
    path.write_bytes(content + begun + bytes(50))

    assert store.read_results(path).records == (make_record(),)
    assert write(path, make_record("fewbit:3")).startswith(content + b'{"schema_version":1,"recipe"')


def test_a_half_written_line_is_set_aside_in_a_file_beside(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    content = write(path, make_record())
    torn = b'{"schema_version":1,"rec'
    for _ in range(2):
        path.write_bytes(content + torn)
        with Store.opened(path, MeasuredRecord) as opened:
            assert "box.jsonl.torn" in str(opened.notice)
            opened.append(make_record("fewbit:3"))

    assert torn_path(path).read_bytes() == (torn + b"\n") * 2
    assert len(store.read_results(path).records) == 2


def test_an_older_version_is_migrated_step_by_step(make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    old = json.loads(record.model_dump_json()) | {"schema_version": -1}
    old["question"] = old.pop("recipe")
    monkeypatch.setitem(MeasuredRecord.migrations, -1, lambda data: data | {"schema_version": 0})

    def rename(data: dict[str, object]) -> dict[str, object]:
        return {"recipe" if key == "question" else key: value for key, value in data.items()} | {"schema_version": 1}

    monkeypatch.setitem(MeasuredRecord.migrations, 0, rename)

    assert lines.parse_record(MeasuredRecord, json.dumps(old).encode(), "old:1") == record


def test_results_of_schema_1_are_read_for_ever() -> None:
    exact, fewbit, measured, failed = store.read_results(DATA / "results-schema-1.jsonl").records

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


def test_results_files_are_found_in_folders_at_any_depth(tmp_path: Path) -> None:
    for name in ("b/box.jsonl", "a/box.jsonl", "a/box.md", "a/box.jsonl.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    first, second = tmp_path / "a" / "box.jsonl", tmp_path / "b" / "box.jsonl"

    assert kinds.files_in([tmp_path]) == [first, second]
    assert kinds.files_in([second, tmp_path]) == [second, first]
    with pytest.raises(StoreError, match="empty holds no results file"):
        kinds.files_in([tmp_path / "empty"])


def test_results_stand_by_recipe_and_machine() -> None:
    assert store.results_path(Path("results"), "quickstart", "box") == Path("results/quickstart/box.jsonl")
    assert store.results_path(Path("r"), "hf:org/name", "../a b") == Path("r/hf-org-name/a-b.jsonl")
    assert store.results_path(Path("r"), "...", "") == Path("r/unnamed/unnamed.jsonl")
