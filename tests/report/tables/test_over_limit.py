"""Cases that need more memory than they may use: their rows, and the notes on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from peakparts import ACTIVATIONS

from actbench.model.measured import MeasuredRecord
from actbench.model.records import Failure
from actbench.report import tables
from actbench.report.advice import about_limit
from actbench.report.compare import compare, parse_limit
from actbench.report.render import csv_text, markdown
from actbench.units import GIB

MakeRecord = Callable[..., MeasuredRecord]


def old(record: MeasuredRecord, peak_bytes: int | None) -> MeasuredRecord:
    """Return a record as it was written of a case that did not fit, before such cases were measured."""
    failure = Failure(reason="out-of-memory", message="the step needs more", peak_bytes=peak_bytes)
    return record.model_copy(update={"outcome": failure})


@pytest.fixture
def records(make_record: MakeRecord) -> list[MeasuredRecord]:
    limit = {"memory_limit_bytes": 16 * GIB}
    exact = make_record(**limit, peak_bytes=40 * GIB, activation_bytes=38 * GIB)
    measured = {"over_limit_bytes": 24 * GIB, "peak_phase": "backward", "peak_parts": ACTIVATIONS, **limit}
    exact = exact.model_copy(update={"outcome": exact.outcome.model_copy(update=measured)})
    return [exact, make_record("fewbit:3", **limit, peak_bytes=10 * GIB, activation_bytes=19 * GIB)]


def test_the_exact_model_that_does_not_fit_is_what_others_are_read_against(records: list[MeasuredRecord]) -> None:
    exact, scheme = tables.results_table(records).rows

    assert (exact["peak_bytes"], exact["over_limit_bytes"], exact["peak_saving"]) == (40 * GIB, 24 * GIB, 0)
    assert (scheme["over_limit_bytes"], scheme["peak_saving"], scheme["activation_ratio"]) == (None, 0.75, 2)


def test_it_is_marked_in_markdown_and_csv_and_a_note_says_what_to_do(records: list[MeasuredRecord]) -> None:
    table = tables.results_table(records)

    assert "| Over limit ↓ |" in markdown(table)
    assert "| 24.00 GiB |" in markdown(table)
    assert f",{24 * GIB}," in csv_text(table)
    assert [note for note in table.notes if "over the limit" in note] == [about_limit(records[0])]
    assert about_limit(records[0]) == (
        "tiny, exact, batch 8 (simulated): over the limit of 16.00 GiB by 24.00 GiB; the peak is in the backward pass, "
        "95 % of it saved activations; take a smaller --batch-size, or a --scheme that changes saved tensors or "
        "recomputation or loss (see 'actbench schemes')"
    )


def test_a_note_says_that_reserved_bytes_are_counted(records: list[MeasuredRecord]) -> None:
    told = "Over limit counts what torch's allocator reserves: the peak, and the gaps between its blocks."
    exact, fits = records
    reserving = exact.model_copy(update={"outcome": exact.outcome.model_copy(update={"reserved_bytes": 41 * GIB})})

    assert told in tables.results_table([reserving, fits]).notes
    assert told in tables.results_table([reserving] * 4).notes
    assert told not in tables.results_table(records).notes


def test_many_rows_over_their_limit_are_told_together(records: list[MeasuredRecord]) -> None:
    schemes = ("exact", "a", "b", "c")
    rows = [records[0].model_copy(update={"case": records[0].case.model_copy(update={"scheme": s})}) for s in schemes]
    [note] = [note for note in tables.results_table(rows).notes if "Too large" in note]

    assert note == (
        "Too large in the backward pass (limit 16.00 GiB): exact, a, b, c; take a smaller --batch-size, "
        "or a --scheme that changes saved tensors or recomputation or loss (see 'actbench schemes')"
    )


def test_what_fits_is_not_marked(make_record: MakeRecord) -> None:
    table = tables.results_table([make_record()])

    assert "over_limit_bytes" not in [column.key for column in table.columns]
    assert about_limit(make_record()) is None
    assert about_limit(make_record(failure="no room")) is None


def test_an_older_record_of_what_did_not_fit_has_its_peak_and_is_read_against(records: list[MeasuredRecord]) -> None:
    exact, scheme = tables.results_table([old(records[0], 40 * GIB), old(records[1], 20 * GIB)]).rows

    assert (exact["peak_bytes"], exact["over_limit_bytes"], exact["status"]) == (40 * GIB, 24 * GIB, "out-of-memory")
    assert (scheme["peak_bytes"], scheme["over_limit_bytes"], scheme["peak_saving"]) == (20 * GIB, 4 * GIB, 0.5)


def test_what_ran_out_of_memory_on_a_device_has_no_numbers(records: list[MeasuredRecord]) -> None:
    table = tables.results_table([old(records[0], None), records[1]])

    assert [row["peak_bytes"] for row in table.rows] == [None, 10 * GIB]
    assert "peak_saving" not in [column.key for column in table.columns]


def test_two_files_are_compared_by_peaks_over_the_limit(records: list[MeasuredRecord]) -> None:
    grown = records[0].model_copy(update={"outcome": records[0].outcome.model_copy(update={"peak_bytes": 44 * GIB})})
    found = compare([old(records[0], 40 * GIB)], [grown], [parse_limit("peak:5%")])

    assert found.table.rows[0]["peak_change"] == pytest.approx(0.1)
    assert len(found.violations) == 1


def test_what_is_over_its_limit_is_no_choice_of_the_frontier(make_record: MakeRecord) -> None:
    timed = {"meter": "cpu", "timing_round": "a"}
    rows = [
        make_record(**timed, step_seconds=(1.0, 1.0), peak_bytes=900),
        make_record("a", **timed, step_seconds=(2.0, 2.0), peak_bytes=800),
        make_record("b", **timed, step_seconds=(3.0, 3.0), peak_bytes=700, over_limit_bytes=5),
    ]

    assert [row["pareto"] for row in tables.results_table(rows).rows] == [True, True, None]


def test_memory_that_is_lost_between_blocks_is_told(make_record: MakeRecord) -> None:
    record = make_record(peak_bytes=900)
    lost = record.outcome.model_copy(update={"memory_limit_bytes": 1000, "over_limit_bytes": 24})

    told = about_limit(record.model_copy(update={"outcome": lost}))

    assert told == (
        "tiny, exact, batch 8 (simulated): over the limit of 1,000 B by 24 B; the peak fits, but its allocator loses "
        "memory between blocks"
    )


def test_rows_that_only_the_gaps_take_over_the_limit_are_told_apart(records: list[MeasuredRecord]) -> None:
    def row(scheme: str, peak_bytes: int) -> MeasuredRecord:
        case = records[0].case.model_copy(update={"scheme": scheme})
        outcome = records[0].outcome.model_copy(update={"peak_bytes": peak_bytes, "memory_limit_bytes": 16 * GIB})
        return records[0].model_copy(update={"case": case, "outcome": outcome})

    rows = [row("exact", 40 * GIB), row("a", 15 * GIB), row("b", 30 * GIB), row("c", 14 * GIB)]
    over, lost = [note for note in tables.results_table(rows).notes if "Too large" in note]

    assert over.startswith("Too large in the backward pass (limit 16.00 GiB): exact, b; ")
    assert lost.startswith(
        "Too large in the backward pass, by what the allocator loses between blocks (limit 16.00 GiB): a, c; "
    )


def test_rows_are_named_once_with_all_sizes_that_are_too_large(records: list[MeasuredRecord]) -> None:
    cases = (("exact", 2048, 1), ("checkpoint", 2048, 1), ("checkpoint", 4096, 1), ("checkpoint", 2048, 2))
    fields = ("scheme", "sequence_length", "batch_size")
    rows = [
        records[0].model_copy(update={"case": records[0].case.model_copy(update=dict(zip(fields, case, strict=True)))})
        for case in cases
    ]
    of_a_length = [note for note in tables.results_table([*rows[:3], rows[1]]).notes if "Too large" in note]
    of_all = [note for note in tables.results_table(rows).notes if "Too large" in note]

    assert "GiB): exact (2,048 tokens), checkpoint (2,048 tokens, 4,096 tokens); take" in of_a_length[0]
    assert "GiB): exact (batch 1 of 2,048 tokens), checkpoint (batch 1 of 2,048 tokens, batch " in of_all[0]
