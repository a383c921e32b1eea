"""Files of many rows: what is held in memory, and what is read."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from actbench.model.measured import MeasuredRecord, Measurement, PeakParts
from actbench.model.records import Site
from actbench.report import interned, lines, store
from actbench.report.linefile import LineFile
from actbench.report.store import Store

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


def test_records_to_compare_take_half_of_the_memory(tmp_path: Path, make_record: MakeRecord) -> None:
    path, parts = tmp_path / "box.jsonl", dict.fromkeys(PeakParts.model_fields, 2**40)
    outcome = {"peak_parts": PeakParts(**parts), "untimed": "No step time is estimated. " * 9, "warnings": ("w" * 200,)}
    written(path, *(make_record(seed=seed, **outcome) for seed in range(400)))

    def held_bytes(without: tuple[str, ...], *, twice: bool = False) -> int:
        like, _ = store.read_all([path], without) if twice else ([], [])
        tracemalloc.start()
        try:
            records, _ = store.read_all([path], without, like)
            assert len(records) == 400
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    held_bytes(())  # what is loaded once
    whole = held_bytes(())
    assert held_bytes(interned.UNCOMPARED) < 0.75 * whole
    assert held_bytes(interned.UNCOMPARED, twice=True) < 0.55 * whole


def test_records_share_what_they_have_in_common(tmp_path: Path, make_record: MakeRecord) -> None:
    sites = (Site(path="a", was="nn.GELU", becomes="3-bit GELU", bytes_before=8, bytes_after=1),)
    there = make_record(machine="there", sites=sites, seed=1)
    written(tmp_path / "box.jsonl", make_record(sites=sites), make_record("fewbit:3", sites=sites), there)
    first, second, third = store.read_results(tmp_path / "box.jsonl").records
    assert isinstance(first.outcome, Measurement)
    assert isinstance(second.outcome, Measurement)

    assert first.machine is second.machine
    assert first.versions is second.versions is third.versions
    assert first.outcome.sites[0] is second.outcome.sites[0]
    assert first.case.model_fields_set is second.case.model_fields_set
    assert third == there
    assert third.model_dump_json() == there.model_dump_json()


def test_a_changed_copy_of_a_record_leaves_the_others_alone(tmp_path: Path, make_record: MakeRecord) -> None:
    line = make_record().model_dump_json(exclude={"label"})
    (tmp_path / "box.jsonl").write_text(line + "\n" + line.replace('"seed":0', '"seed":1') + "\n")
    first, second = store.read_results(tmp_path / "box.jsonl").records

    assert "label" in first.model_copy(update={"label": "mine"}).model_fields_set
    assert "label" not in second.model_fields_set


def test_records_can_be_read_without_their_sites(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    written(path, make_record(sites=(Site(path="a", was="nn.GELU", becomes="3-bit GELU"),)))
    (whole,), _ = store.read_all([path])
    (lean,), _ = store.read_all([path], interned.UNTABLED)
    assert isinstance(whole.outcome, Measurement)
    assert isinstance(lean.outcome, Measurement)

    assert len(whole.outcome.sites) == 1
    assert lean.outcome.sites == ()
    assert lean.outcome.model_dump() == whole.outcome.model_copy(update={"sites": ()}).model_dump()


def test_parts_of_measurements_share_the_names_of_their_fields(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "box.jsonl"
    written(path, *(make_record(seed=seed, peak_parts=PeakParts(weights_bytes=2**40 + seed)) for seed in range(2)))
    outcomes = [record.outcome for record in store.read_all([path], interned.UNTABLED)[0]]
    first, second = (each.peak_parts for each in outcomes if isinstance(each, Measurement))

    assert first is not None
    assert second is not None
    assert first != second
    assert first.model_fields_set is second.model_fields_set


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
