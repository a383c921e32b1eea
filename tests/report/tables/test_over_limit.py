"""Cases that need more memory than they may use, and what is said of where their peak is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actbench.model.advice import advice
from actbench.model.estimated import EstimatedTime
from actbench.model.measured import LargestBatch, MeasuredRecord, Measurement, PeakParts
from actbench.model.records import Built, Failure, Site, Unreached
from actbench.model.scripts import Script
from actbench.report import tables
from actbench.report.advice import about_limit, about_peak
from actbench.report.compare import compare, parse_limit
from actbench.report.render import csv_text, markdown
from actbench.units import GIB, MIB

MakeRecord = Callable[..., MeasuredRecord]
ACTIVATIONS = PeakParts(weights_bytes=GIB, activation_bytes=38 * GIB, temporary_bytes=GIB)
STATE = PeakParts(weights_bytes=GIB, gradients_bytes=GIB, optimizer_bytes=2 * GIB, temporary_bytes=GIB)


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
    [note] = [note for note in tables.results_table(rows).notes if "ver the limit" in note]

    assert note == (
        "Over the limit of 16.00 GiB, with the peak in the backward pass: exact, a, b, c; take a smaller --batch-size, "
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


def measured(phase: str | None, parts: PeakParts | None, peak_bytes: int = 5 * GIB) -> Measurement:
    return Measurement(weights_bytes=1, activation_bytes=1, peak_bytes=peak_bytes, peak_phase=phase, peak_parts=parts)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (measured(None, None), None),
        (measured("backward", None), "the peak is in the backward pass; take a smaller --batch-size"),
        (measured("optimizer", None), "the peak is in the optimizer step; take another --optimizer"),
        (measured("backward", STATE), "pass, 80 % of it weights, gradients and optimizer state; take another --optimi"),
        (measured("forward", ACTIVATIONS, 40 * GIB), "forward pass, 95 % of it saved activations; take a smaller --ba"),
    ],
)
def test_the_advice_goes_by_the_phase_and_what_fills_it(found: Measurement, expected: str | None) -> None:
    told = about_peak(found)

    assert told is None if expected is None else expected in (told or "")


def test_weights_that_a_scheme_leaves_whole_are_named_if_they_fill_the_peak() -> None:
    left = (Unreached(path="layers.0.experts", kind="MixtralExperts", reason="a reason", weights_bytes=3 * GIB),)
    found = measured("forward", STATE).model_copy(update={"unreached": left})
    assert "the scheme leaves the weights of MixtralExperts whole: spread them over" in (about_peak(found) or "")
    assert "another --optimizer" not in (about_peak(found) or "")
    small = found.model_copy(update={"peak_bytes": 7 * GIB})
    assert "another --optimizer" in (about_peak(small) or "")


def test_the_advice_names_schemes_that_the_case_does_not_use_yet(make_record: MakeRecord) -> None:
    found = measured("backward", None).model_copy(update={"remedies": ("checkpoint", "chunked_loss", "offload")})
    used = make_record("checkpoint:2,every=4+offload").case

    assert (about_peak(found, make_record().case) or "").endswith(
        "loss, such as checkpoint or chunked_loss or offload (see 'actbench schemes')"
    )
    assert (about_peak(found, used) or "").endswith("loss, such as chunked_loss (see 'actbench schemes')")


@pytest.mark.parametrize(
    ("phase", "built", "expected"),
    [
        ("backward", Built(model_class="Net", batch_size=8), "take a smaller --batch-size, or a --scheme"),
        ("backward", Built(model_class="Net"), "take a smaller batch in the script, or a --scheme"),
        ("optimizer", Built(model_class="Net", batch_size=8), "take another optimizer in the script, or a --scheme"),
    ],
)
def test_the_advice_for_a_script_is_what_it_can_take(
    make_record: MakeRecord, phase: str, built: Built, expected: str
) -> None:
    record = make_record(
        model="train.py",
        script=Script(target="train.py"),
        built=built,
        peak_phase=phase,
        memory_limit_bytes=10,
        over_limit_bytes=5,
    )
    outcome = record.outcome.model_copy(update={"memory_limit_bytes": 10})

    assert expected in (about_limit(record.model_copy(update={"outcome": outcome})) or "")


def test_schemes_are_found_by_what_they_change() -> None:
    asked: list[tuple[str, ...]] = []

    def find(changes: tuple[str, ...]) -> list[str]:
        asked.append(tuple(changes))
        return ["one", "two"]

    told = advice("optimizer", mostly_model=False, find=find)
    assert told.endswith("changes optimizer or gradients: one, two")
    assert asked == [("optimizer", "gradients")]


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
    over, lost = [note for note in tables.results_table(rows).notes if "ver the limit" in note]

    assert over.startswith("Over the limit of 16.00 GiB, with the peak in the backward pass: exact, b; ")
    assert lost.startswith(
        "Over the limit of 16.00 GiB, with the peak in the backward pass, which fits but for what the allocator loses "
        "between blocks: a, c; "
    )


NO_PARTS = dict.fromkeys(("host_seconds", "device_seconds", "flops", "moved_bytes"), 0)


def timed(seconds: float, *, is_estimated: bool) -> dict[str, Any]:
    """Return the fields of a step that took so long, or would."""
    if not is_estimated:
        return {"meter": "cpu", "step_seconds": (seconds,) * 4, "timing_round": "a"}
    passes = dict.fromkeys(("forward_seconds", "backward_seconds", "optimizer_seconds"), seconds / 3)
    return {"estimated": EstimatedTime(step_seconds=seconds, **passes, **NO_PARTS)}


@pytest.mark.parametrize("is_estimated", [False, True])
def test_a_scheme_that_makes_the_step_faster_is_not_said_to_save_nothing(
    make_record: MakeRecord, is_estimated: bool
) -> None:
    seconds = {"exact": 1.0, "fast": 0.94, "alike": 0.96, "slow": 1.2}
    same = {"peak_bytes": 5 * GIB, "peak_phase": "optimizer", "peak_parts": STATE}
    rows = [make_record(name, **same, **timed(each, is_estimated=is_estimated)) for name, each in seconds.items()]

    told = [note.partition(": nothing")[0] for note in tables.results_table(rows).notes if "nothing of the" in note]

    assert told == ["alike, slow"]


@pytest.mark.parametrize("is_estimated", [False, True])
@pytest.mark.parametrize(("seconds", "is_told"), [(1.4, False), (1.45, True), (None, True)])
def test_a_stack_is_faster_than_what_it_extends(
    make_record: MakeRecord, seconds: float | None, is_told: bool, is_estimated: bool
) -> None:
    where = {"peak_bytes": 3 * GIB, "peak_phase": "optimizer", "peak_parts": STATE}
    last = timed(seconds or 1.0, is_estimated=is_estimated)
    if seconds is None:
        last = {name: value for name, value in last.items() if name == "meter"}
    rows = [
        make_record(peak_bytes=5 * GIB, **timed(1.0, is_estimated=is_estimated)),
        make_record("checkpoint", **where, **timed(1.5, is_estimated=is_estimated)),
        make_record("channels_last+checkpoint", **where, **last),
    ]

    assert any("is saved compared with checkpoint" in note for note in tables.results_table(rows).notes) == is_told


def test_a_scheme_that_saves_nothing_says_where_the_peak_is(make_record: MakeRecord) -> None:
    exact = make_record(peak_bytes=5 * GIB)
    same = make_record("gact", peak_bytes=5 * GIB, peak_phase="optimizer", peak_parts=STATE)
    less = make_record("fewbit", peak_bytes=4 * GIB, peak_phase="optimizer", peak_parts=STATE)

    notes = tables.results_table([exact, same, less]).notes

    assert [note.partition(";")[0] for note in notes if "nothing of the peak" in note] == [
        "tiny, gact, batch 8 (simulated): nothing of the peak is saved"
    ]


def test_a_scheme_that_needs_more_says_that_other_layers_keep_the_same_tensors(make_record: MakeRecord) -> None:
    def relu(after: int) -> tuple[Site, ...]:
        return (Site(path="relu", was="nn.ReLU", becomes="1-bit ReLU", bytes_before=64 * MIB, bytes_after=after),)

    exact = make_record(peak_bytes=5 * GIB, activation_bytes=GIB)
    grown = make_record("fewbit", peak_bytes=5 * GIB + 1, activation_bytes=GIB + 1, sites=relu(2 * MIB))
    honest = make_record("encode", peak_bytes=5 * GIB + 1, activation_bytes=GIB + 1, sites=relu(65 * MIB))
    faster = make_record("gact", peak_bytes=5 * GIB - 1, activation_bytes=GIB + 1, sites=relu(2 * MIB))

    notes = tables.results_table([exact, grown, honest, faster]).notes

    assert [note.partition(":")[0] for note in notes if "other layers keep the same tensors" in note] == [
        "tiny, fewbit, batch 8 (simulated)"
    ]


@pytest.mark.parametrize(
    ("others", "within"),
    [(384 * MIB, "384.00 MiB"), (16 * GIB, "16.00 GiB for resnet50 (simulated) and in 384.00 MiB for vit (cpu)")],
)
def test_a_note_and_a_column_say_in_which_memory_the_largest_batch_fits(
    make_record: MakeRecord, others: int, within: str
) -> None:
    searched = [
        make_record(
            scheme,
            model=model,
            meter=meter,
            memory_limit_bytes=limit,
            largest_batch=7,
            largest_batch_search=LargestBatch(
                batch_size=7,
                predicted=7,
                fits_peak_bytes=1,
                next_outcome="over-limit",
                memory_limit_bytes=limit,
                trials=2,
            ),
        )
        for model, meter, limit in (("vit", "cpu", 384 * MIB), ("resnet50", "simulated", others))
        for scheme in ("exact", "checkpoint")
    ]
    table = tables.results_table(searched)

    note = f"Largest batch: what fits in {within}, found and proved. All other columns are of a step at Batch."
    assert note in table.notes
    assert note in markdown(table)
    limits = {"vit": 384 * MIB, "resnet50": others}
    assert [row["largest_batch_limit_bytes"] for row in table.rows] == [limits[row["model"]] for row in table.rows]
    assert f",{384 * MIB}," in csv_text(table)
