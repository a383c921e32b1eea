"""Rows that differ in nothing but the seed are one: mean and deviation, in tables, comparisons and charts."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from actbench.model.measured import MeasuredRecord, PhasePeaks
from actbench.report import render
from actbench.report.compare import compare, parse_limit
from actbench.report.tables import results_table
from actbench.report.tables.entries import join
from actbench.tools.html.measured import beside_measured

MakeRecord = Callable[..., MeasuredRecord]
PEAKS = {"exact": (1000, 1000, 1000), "fewbit:3": (800, 830, 842)}
ERRORS = (0.1, 0.2, 0.3)


@pytest.fixture
def records(make_record: MakeRecord) -> list[MeasuredRecord]:
    """Return three seeds of two schemes, the last seed first; they were timed in turns, each seed in its own round."""
    return [
        make_record(
            scheme,
            seed=seed,
            meter="cpu",
            peak_bytes=peaks[seed],
            step_seconds=(1.0 + (scheme != "exact"), 2.0 + (scheme != "exact")),
            timing_round=f"round{seed}",
            **({"gradient_error": ERRORS[seed]} if scheme != "exact" else {}),
        )
        for seed in (2, 0, 1)
        for scheme, peaks in PEAKS.items()
    ]


def test_several_seeds_are_one_row_with_mean_and_deviation(records: list[MeasuredRecord]) -> None:
    table = results_table(records)
    exact, scheme = table.rows

    assert (exact["peak_bytes"], exact["peak_bytes_spread"]) == (1000, None)
    assert (scheme["peak_bytes"], scheme["peak_bytes_spread"]) == (824, statistics.stdev(PEAKS["fewbit:3"]))
    assert scheme["peak_saving"] == pytest.approx(0.176)
    assert (scheme["gradient_error"], scheme["gradient_error_spread"]) == pytest.approx((0.2, 0.1))
    assert scheme["step_seconds"] == 2.5
    assert scheme["relative_throughput"] == pytest.approx(1.5 / 2.5)
    assert any("seed 0, 1, 2" in note for note in table.notes)
    assert "| 824 B ± 22 B |" in render.markdown(table)


def test_seeds_of_other_rounds_are_not_compared_in_speed(
    records: list[MeasuredRecord], make_record: MakeRecord
) -> None:
    later = [record for record in records if record.case.scheme != "exact" or record.case.seed != 2]
    exact = make_record(seed=2, meter="cpu", step_seconds=(1.0,), timing_round="another")
    row = results_table([*later, exact]).rows[1]

    assert row["relative_throughput"] is None


def test_other_settings_and_failures_stay_rows_of_their_own(make_record: MakeRecord) -> None:
    records = [
        make_record(seed=0),
        make_record(seed=1, batch_size=4),
        make_record("a", seed=0),
        make_record("a", seed=1),
        make_record("a", seed=2, failure="no room"),
    ]
    rows = results_table(records).rows

    assert [(row["batch_size"], row["scheme"], row["seed"]) for row in rows] == [
        (4, "exact", 1),
        (8, "exact", 0),
        (8, "a", "0, 1"),
        (8, "a", 2),
    ]
    assert rows[3]["status"] == "out-of-memory"


def test_a_seed_over_its_limit_is_not_averaged_away(make_record: MakeRecord) -> None:
    limits = {"memory_limit_bytes": 900, "meter": "cpu"}
    fits = make_record(seed=0, peak_bytes=800, **limits)
    over = make_record(seed=1, peak_bytes=950, over_limit_bytes=50, **limits)
    (entry,) = join([fits, over])

    assert entry.measured is not None
    assert (entry.measured.peak_bytes, entry.measured.over_limit_bytes, entry.measured.fits) == (875, 50, False)


def test_means_of_the_same_seeds_are_compared(records: list[MeasuredRecord], make_record: MakeRecord) -> None:
    more = {"peak_bytes": 1100}
    grown = [each.model_copy(update={"outcome": each.outcome.model_copy(update=more)}) for each in records]
    found = compare(records, grown, [parse_limit("peak:20%")])
    exact, scheme = found.table.rows

    assert (exact["peak_bytes_before"], exact["peak_bytes_after"]) == (1000, 1100)
    assert (scheme["peak_bytes_before"], scheme["peak_bytes_before_spread"]) == (824, pytest.approx(21.6, abs=0.1))
    assert "| 824 B ± 22 B | 1.07 KiB |" in render.markdown(found.table)
    assert [check.broken for check in found.checks] == ["", "824 B before, 1.07 KiB now"]
    assert len(compare(records, [make_record("fewbit:3", seed=0, meter="cpu")]).table.rows) == 3


def test_a_seed_that_one_file_alone_has_is_in_no_mean(make_record: MakeRecord) -> None:
    limits = [parse_limit("peak:5%")]
    before = [make_record(seed=seed, peak_bytes=1000) for seed in (0, 1)]
    more = [make_record(seed=seed, peak_bytes=peak) for seed, peak in enumerate((1000, 1000, 9000, 9100))]
    found = compare(before, more, limits)

    assert found.violations == ()
    assert [(row["seed"], row["peak_bytes_before"], row["peak_bytes_after"]) for row in found.table.rows] == [
        ("0, 1", 1000, 1000),
        ("2, 3", None, 9050),
    ]
    assert compare(before[:1], before, limits).violations == ()
    (missing,) = compare(before, before[:1], limits).violations
    assert "seed 1): missing from the second file" in missing


def test_a_seed_that_fails_now_breaks_the_limit_and_others_are_compared(make_record: MakeRecord) -> None:
    before = [make_record(seed=seed) for seed in range(4)]
    after = [*(make_record(seed=seed) for seed in range(2)), *(make_record(seed=seed, failure="no") for seed in (2, 3))]
    checks = compare(before, after, [parse_limit("peak:5%")]).checks

    assert [(check.case.partition("seed ")[2], check.broken.partition(": ")[2]) for check in checks] == [
        ("0, 1)", ""),
        ("2)", "out-of-memory"),
        ("3)", "out-of-memory"),
    ]


def test_peaks_of_phases_are_means(make_record: MakeRecord) -> None:
    peaks = [PhasePeaks(forward_bytes=seed, backward_bytes=10 * seed, optimizer_bytes=1) for seed in (1, 3)]
    (row,) = results_table([make_record(seed=seed, phase_peaks=each) for seed, each in enumerate(peaks)]).rows

    assert [row[f"{phase}_peak_bytes"] for phase in ("forward", "backward", "optimizer")] == [2, 20, 1]


def test_the_latest_record_of_a_seed_counts(make_record: MakeRecord) -> None:
    def measured(seed: int, peak_bytes: int, day: int) -> MeasuredRecord:
        found = make_record(seed=seed, peak_bytes=peak_bytes)
        return found.model_copy(update={"recorded_at": f"2026-01-{day:02}"})

    both = [measured(0, 100, 2), measured(1, 200, 1), measured(0, 900, 1), measured(1, 300, 3)]
    (row,) = results_table(both).rows
    rows = results_table([*both, make_record("a", seed=1), make_record("a", seed=1, peak_bytes=7)]).rows

    assert row["peak_bytes"] == 200
    assert [(each["seed"], each["peak_bytes"]) for each in rows] == [("0, 1", 200), (1, 7)]


def test_a_chart_has_one_point_and_one_bar_for_all_seeds(records: list[MeasuredRecord]) -> None:
    beside = beside_measured(records)
    (group,) = beside.groups
    frontier = next(picture for picture in group.pictures if picture.title == "Memory against time")

    titles = [each.findtext("title") or "" for each in frontier.chart.svg.findall("path[title]")]
    assert [title.split("\n")[:2] for title in titles] == [
        ["exact", "peak: 1,000 B"],
        ["fewbit:3", "peak: 824 B ± 22 B"],
    ]
    assert [details.texts["Seeds"] for details in beside.details] == ["0, 1, 2; numbers are means"] * 2


def test_an_infinite_error_of_one_seed_has_no_deviation(make_record: MakeRecord) -> None:
    records = [make_record("a", seed=seed, gradient_error=error) for seed, error in enumerate((0.5, float("inf")))]

    (row,) = results_table(records).rows

    assert row["gradient_error"] == float("inf")
    assert row.get("gradient_error_spread") is None
