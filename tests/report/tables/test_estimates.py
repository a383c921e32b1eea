"""Estimated times in tables: marked, in columns of their own, never among measured ones."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from actbench.model.estimated import Communication, EstimatedTime, OperatorTime
from actbench.model.measured import LargestBatch, MeasuredRecord, Measurement
from actbench.model.provenance import Machine, Versions
from actbench.model.records import Case
from actbench.report.render import csv_text, markdown
from actbench.report.tables import results_table
from actbench.report.tables.step import DEAREST, operator_tables


def time(seconds: float, **operators: float) -> EstimatedTime:
    named = tuple(OperatorTime(name=name, calls=3, seconds=each) for name, each in operators.items())
    parts = dict.fromkeys(("forward_seconds", "backward_seconds", "optimizer_seconds"), seconds / 3)
    return EstimatedTime(
        step_seconds=seconds, **parts, host_seconds=0, device_seconds=seconds, flops=1, moved_bytes=1, by_operator=named
    )


def record(scheme: str, peak: int, estimated: EstimatedTime | None = None, **more: Any) -> MeasuredRecord:
    settings = {"meter": "simulated", "device_profile": "t4", **more.pop("case", {})}
    return MeasuredRecord(
        recipe="r",
        case=Case(model="resnet18", batch_size=10, scheme=scheme, **settings),
        outcome=Measurement(
            weights_bytes=1, activation_bytes=1, peak_bytes=peak, estimated=estimated, dtype="float32", **more
        ),
        machine=Machine(name="m", system="s", processor="p", cores=2, memory_bytes=1),
        versions=Versions(actbench="0", python="3", torch="2"),
        command="c",
        recorded_at="2026-01-01T00:00:00Z",
    )


ROWS = [
    record("exact", 100, time(0.5)),
    record("checkpoint", 60, time(0.625)),
    record("offload", 70, time(1.0)),
    record("exact", 90, case={"meter": "cpu", "device_profile": None}, step_seconds=(0.25,)),
]


def rows_of(records: list[MeasuredRecord]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_text(results_table(records)))))


def shared(scheme: str, sent: dict[str, int], seconds: float, exposed: float) -> MeasuredRecord:
    """Return the record of one process of several, which sends so many bytes by each kind of collective."""
    beside = (OperatorTime(name=kind, calls=2, seconds=seconds, is_beside=True) for kind in sent)
    whole = time(0.5, mm=0.5 - exposed)
    estimated = whole.model_copy(
        update={
            "by_operator": (*whole.by_operator, *beside),
            "communication_seconds": seconds * len(sent),
            "exposed_seconds": exposed,
        }
    )
    kinds = tuple(Communication(kind=kind, calls=2, sent_bytes=amount) for kind, amount in sent.items())
    return record(scheme, 50, estimated, communication=kinds)


def test_what_a_process_sends_has_columns_of_its_own() -> None:
    found = rows_of(
        [record("exact", 100, time(0.5)), shared("offload", {"all-gather": 7, "all-reduce": 5}, 0.25, 0.125)]
    )

    assert [row["sent_bytes"] for row in found] == ["", "12"]
    assert [row["estimated_communication_seconds"] for row in found] == ["", "0.5"]
    assert [row["estimated_exposed_seconds"] for row in found] == ["", "0.125"]


def test_nothing_is_said_of_communication_where_there_is_none() -> None:
    assert "Comm." not in markdown(results_table(ROWS))


def test_what_is_exchanged_stands_below_the_step_and_is_no_part_of_it() -> None:
    [table] = operator_tables([shared("offload", {"all-gather": 7}, 0.25, 0.125)])

    rows = {row["operator"]: row["offload_seconds"] for row in table.rows}
    names = list(rows)
    assert names.index("all-gather, parallel to the step") > names.index("step")
    assert rows["all-gather, parallel to the step"] == 0.25
    assert sum(value for name, value in rows.items() if name in ("mm", "(all others)")) == pytest.approx(0.375)


def test_people_see_an_estimate_marked_in_the_column_of_measured_values() -> None:
    text = markdown(results_table(ROWS))

    assert "| 0.80x est. |" in text
    assert "| 20 est. |" in text
    assert "| 40 |" in text
    assert "not measured; see docs/time.md" in text


def test_a_table_without_a_time_has_no_note_on_estimated_times() -> None:
    assert "est." not in markdown(results_table(ROWS, columns=["peak", "saved"]))
    assert "not measured; see docs/time.md" in markdown(results_table(ROWS, columns=["peak", "speed"]))


def test_a_peak_that_is_an_estimate_is_marked_and_its_reason_told_once() -> None:
    rows = [record("exact", 100 * 2**20, approximate=("cuDNN tells",)), record("checkpoint", 50 * 2**20)]
    table = results_table([*rows, record("accumulate:2", 70 * 2**20, approximate=("cuDNN tells",))])
    shown = markdown(table)

    assert "~100.00 MiB" in shown
    assert "~70.00 MiB" in shown
    assert "50.00 MiB" in shown
    assert "~50.00 MiB" not in shown
    assert [note for note in table.notes if "cuDNN" in note] == ["~: an estimated peak: cuDNN tells."]


def test_a_file_has_columns_of_their_own_for_estimates() -> None:
    by_meter = {(row["scheme"], row["meter"]): row for row in rows_of(ROWS)}
    simulated, measured = by_meter["checkpoint", "simulated"], by_meter["exact", "cpu"]

    assert (simulated["step_seconds"], simulated["estimated_step_seconds"]) == ("", "0.625")
    assert float(simulated["estimated_relative_throughput"]) == pytest.approx(0.8)
    assert (measured["step_seconds"], measured["estimated_step_seconds"]) == ("0.25", "")


def test_the_frontier_of_estimates_is_marked_apart_from_that_of_measurements() -> None:
    marks = {row["scheme"]: (row["pareto"], row["estimated_pareto"]) for row in rows_of(ROWS[:3])}

    assert marks == {"exact": ("", "True"), "checkpoint": ("", "True"), "offload": ("", "")}


def test_older_records_have_no_estimate_and_no_column_of_one() -> None:
    assert "est." not in markdown(results_table([record("exact", 100)]))


def test_why_there_is_no_time_is_told_once() -> None:
    rows = [record("exact", 100, untimed="No time: x."), record("checkpoint", 60, untimed="No time: x.")]

    assert results_table(rows).notes.count("No time: x.") == 1


def test_unknown_operators_are_named() -> None:
    odd = time(1.0).model_copy(update={"unknown": ("frobnicate",)})

    assert any("counted by their bytes: frobnicate" in note for note in results_table([record("exact", 1, odd)]).notes)


def test_the_largest_batch_has_the_speed_at_that_batch() -> None:
    found = LargestBatch(
        batch_size=40,
        predicted=None,
        memory_limit_bytes=1000,
        fits_peak_bytes=900,
        trials=3,
        estimated_step_seconds=0.5,
    )
    [row] = rows_of([record("exact", 1, time(0.5), largest_batch=40, largest_batch_search=found)])

    assert float(row["estimated_largest_batch_rate"]) == 80


def test_operators_stand_exact_beside_scheme_and_add_up_to_the_step() -> None:
    names = {f"op{place}": 1.0 + place for place in range(DEAREST + 3)}
    exact = time(sum(names.values()), **names)
    more = {**names, "recomputed": 50.0}
    [table] = operator_tables([record("exact", 2, exact), record("checkpoint", 1, time(sum(more.values()), **more))])

    rows = list(table.rows)

    assert [row["operator"] for row in rows[:2]] == ["recomputed", f"op{DEAREST + 2}"]
    assert len(rows) == DEAREST + 2
    for scheme in ("exact", "checkpoint"):
        seconds = [float(row[f"{scheme}_seconds"] or 0) for row in rows]
        assert sum(seconds[:-1]) == pytest.approx(seconds[-1])
