"""Files of many rows: what is held in memory, and what is read."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from actbench.errors import StoreError
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Site
from actbench.report import lines, store
from actbench.report.linefile import LineFile
from actbench.report.store import Store
from actbench.report.tabled import TabledRecord

MakeRecord = Callable[..., MeasuredRecord]


def written(path: Path, *records: MeasuredRecord) -> bytes:
    path.write_text("".join(record.model_dump_json() + "\n" for record in records))
    return path.read_bytes()


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes that Python holds at a time while a function runs."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_file_is_not_held_in_memory(tmp_path: Path, make_record: MakeRecord) -> None:
    path, record = tmp_path / "box.jsonl", make_record()
    size = len(written(path, *[record] * 500))
    store.read_results(path)

    assert peak_bytes(lambda: store.read_results(path)) < size / 4


def test_a_record_in_memory_is_little_larger_than_its_line(tmp_path: Path, make_record: MakeRecord) -> None:
    sizes = []
    for rows in (200, 400):
        path = tmp_path / f"{rows}.jsonl"
        size = len(written(path, *(make_record(seed=seed) for seed in range(rows))))
        store.read_results(path)
        sizes.append((size, peak_bytes(lambda path=path: store.read_results(path))))  # type: ignore[misc]
    (few_bytes, few), (many_bytes, many) = sizes

    assert many - few < 2 * (many_bytes - few_bytes)


def test_a_record_of_a_table_takes_a_third_of_the_memory(tmp_path: Path, make_record: MakeRecord) -> None:
    sites = tuple(Site(path=f"layer.{place}", was="nn.GELU", becomes="3-bit GELU", calls=1) for place in range(20))
    written(tmp_path / "box.jsonl", *(make_record(seed=seed, sites=sites) for seed in range(400)))

    def held_bytes(kind: type[MeasuredRecord]) -> int:
        tracemalloc.start()
        try:
            records, _ = store.read_all([tmp_path / "box.jsonl"], kind)
            assert len(records) == 400
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    held_bytes(MeasuredRecord)  # what is loaded once
    assert 3 * held_bytes(TabledRecord) < held_bytes(MeasuredRecord)


def test_records_share_what_they_have_in_common(tmp_path: Path, make_record: MakeRecord) -> None:
    there = make_record(machine="there", seed=1)
    written(tmp_path / "box.jsonl", make_record(), make_record("fewbit:3"), there)
    first, second, third = store.read_results(tmp_path / "box.jsonl").records

    assert first.machine is second.machine
    assert first.versions is second.versions is third.versions
    assert third == there
    assert third.model_dump_json() == there.model_dump_json()


def test_a_table_reads_all_but_places_blocks_and_operators(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    written(path, make_record(sites=(Site(path="a", was="nn.GELU", becomes="3-bit GELU"),), label="mine"))
    (whole,), _ = store.read_all([path], MeasuredRecord)
    (lean,), _ = store.read_all([path], TabledRecord)
    assert isinstance(whole.outcome, Measurement)
    assert isinstance(lean.outcome, Measurement)

    assert len(whole.outcome.sites) == 1
    assert lean.outcome.sites == ()
    left_out = {"sites", "unreached", "blocks", "trace"}
    assert lean.outcome.model_dump() == whole.outcome.model_dump(exclude=left_out)
    assert lean.model_dump(exclude={"outcome"}) == whole.model_dump(exclude={"outcome"})


@pytest.mark.parametrize("field", ["peak_bytes", "unheard_of"])
def test_a_table_refuses_a_broken_record(tmp_path: Path, make_record: MakeRecord, field: str) -> None:
    data = json.loads(make_record().model_dump_json())
    data["outcome"][field] = [{"nested": 1}]
    path = tmp_path / "box.jsonl"
    path.write_text(json.dumps(data) + "\n")

    with pytest.raises(StoreError, match=f"box.jsonl:1: not a valid record.*{field}"):
        store.read_all([path], TabledRecord)


@pytest.mark.parametrize("length", [1, 100, 2**16 - 1, 2**16, 2**16 + 1, 3 * 2**16])
def test_a_last_line_of_any_length_is_found(tmp_path: Path, make_record: MakeRecord, length: int) -> None:
    path, record, last = tmp_path / "box.jsonl", make_record(), make_record("a", label="x" * length)
    content = written(path, record, last)

    for end, rows in ((content[:-1], 2), (content[:-3], 1), (content, 2), (content + b"\n \n", 2)):
        path.write_bytes(end)
        found = store.read_results(path)
        assert (len(found.records), found.notice is None) == (rows, rows == 2)
        assert found.file_bytes == len(end)
        LineFile(path, found.whole_bytes, found.file_bytes).append(make_record("b").model_dump_json().encode())
        assert store.read_results(path).records[:rows] == (record, last)[:rows]


def test_what_a_sweep_adds_in_the_meantime_is_not_read(tmp_path: Path, make_record: MakeRecord) -> None:
    path, records = tmp_path / "box.jsonl", [make_record(), make_record("a")]
    content = written(path, *records)
    path.write_bytes(content[:-1])  # the next line ends this one first
    found = lines.split(path)
    numbered = found.numbered()
    first = next(numbered)
    with Store.opened(path, MeasuredRecord) as opened:
        opened.append(make_record("b"))

    assert [first, *numbered] == list(enumerate(content.splitlines(), start=1))
