"""Schemes that save nothing of the peak are told, with the reason where one is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from peakparts import STATE

from actbench.model.estimated import EstimatedTime
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Site
from actbench.report import tables
from actbench.units import GIB, MIB

MakeRecord = Callable[..., MeasuredRecord]
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

    told = [note.partition(": no lower")[0] for note in tables.results_table(rows).notes if "no lower peak" in note]

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

    assert any("no lower peak compared with checkpoint" in note for note in tables.results_table(rows).notes) == is_told


def test_a_scheme_that_saves_nothing_says_where_the_peak_is(make_record: MakeRecord) -> None:
    exact = make_record(peak_bytes=5 * GIB)
    same = make_record("gact", peak_bytes=5 * GIB, peak_phase="optimizer", peak_parts=STATE)
    less = make_record("fewbit", peak_bytes=4 * GIB, peak_phase="optimizer", peak_parts=STATE)

    notes = tables.results_table([exact, same, less]).notes

    assert [note.partition(": it")[0] for note in notes if "no lower peak" in note] == ["gact: no lower peak"]


def test_a_scheme_that_needs_more_says_that_other_layers_keep_the_same_tensors(make_record: MakeRecord) -> None:
    def relu(after: int) -> tuple[Site, ...]:
        return (Site(path="relu", was="nn.ReLU", becomes="1-bit ReLU", bytes_before=64 * MIB, bytes_after=after),)

    exact = make_record(peak_bytes=5 * GIB, activation_bytes=GIB)
    grown = make_record("fewbit", peak_bytes=5 * GIB + 1, activation_bytes=GIB + 1, sites=relu(2 * MIB))
    honest = make_record("encode", peak_bytes=5 * GIB + 1, activation_bytes=GIB + 1, sites=relu(65 * MIB))
    faster = make_record("gact", peak_bytes=5 * GIB - 1, activation_bytes=GIB + 1, sites=relu(2 * MIB))

    notes = tables.results_table([exact, grown, honest, faster]).notes

    assert [note.partition(":")[0] for note in notes if "other layers keep the same tensors" in note] == ["fewbit"]
