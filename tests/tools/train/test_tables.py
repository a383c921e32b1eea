from __future__ import annotations

import math
from typing import Any

import pytest

from actbench.report import render
from actbench.tools.train.records import Evaluation
from actbench.tools.train.tables import accuracy_table

MakeRun = Any
MIXED = [("T4", "exact", 0.9), ("T4", "smaq", 0.8), ("H200", "exact", 0.7), ("H200", "smaq", 0.4)]


def test_means_deviations_and_paired_differences(make_run: MakeRun) -> None:
    exact = [make_run("exact", seed, accuracy) for seed, accuracy in enumerate((0.80, 0.90))]
    scheme = [make_run("fewbit:3", seed, accuracy, peak_bytes=400) for seed, accuracy in enumerate((0.79, 0.88))]

    first, second = accuracy_table([*exact, *scheme], "Which?").rows

    assert first["accuracy"] == pytest.approx(0.85)
    assert first["accuracy_deviation"] == pytest.approx(math.sqrt(2 * 0.05**2 / (2 - 1)))
    assert first["accuracy_difference"] is None
    assert second["accuracy_difference"] == pytest.approx((-0.01 - 0.02) / 2)
    assert second["accuracy_difference_deviation"] == pytest.approx(math.sqrt(2 * 0.005**2 / (2 - 1)))
    assert second["peak_saving"] == pytest.approx(1 - 400 / 1000)


def test_differences_are_of_seeds_that_both_have(make_run: MakeRun) -> None:
    runs = [make_run("exact", 0, 0.8), make_run("exact", 1, 0.1), make_run("smaq", 0, 0.7), make_run("smaq", 2, 1.0)]

    row = accuracy_table(runs, "Which?").rows[1]

    assert row["accuracy_difference"] == pytest.approx(-0.1)
    assert "accuracy_difference_deviation" not in row


def test_ratings_have_a_correlation_and_no_accuracy(make_run: MakeRun) -> None:
    def rated(scheme: str, correlation: float) -> Any:
        run = make_run(scheme)
        judged = Evaluation(step=2, loss=1.0, correlation=correlation)
        return run.model_copy(
            update={"outcome": run.outcome.model_copy(update={"metric": "correlation", "evaluations": (judged,)})}
        )

    runs = [rated("exact", 0.9), rated("smaq", 0.7)]
    table = accuracy_table(runs, "Which?")

    assert {"accuracy", "f1"}.isdisjoint(column.key for column in table.columns)
    assert table.rows[1]["correlation"] == 0.7
    assert table.rows[1]["correlation_difference"] == pytest.approx(-0.2)


def test_what_several_processes_did_is_told(make_run: MakeRun) -> None:
    run = make_run()
    together = {"processes": 2, "strategy": "fsdp2", "gradient_accumulation": 4, "max_grad_norm": 0.5}

    notes = accuracy_table([run.model_copy(update={"case": run.case.model_copy(update=together)})], "Which?").notes

    assert "2 processes (fsdp2)" in notes[1]
    assert "cut into 4 parts" in notes[1]
    assert "max grad norm 0.5" in notes[1]


def test_failed_and_diverged_runs_are_told(make_run: MakeRun) -> None:
    runs = [
        make_run("exact"),
        make_run("smaq", failed=True),
        make_run("smaq", 1, losses=(1.0, math.nan), diverged_at=2),
    ]

    text = render.markdown(accuracy_table(runs, "Which?"))

    assert "1 failed, 1 diverged" in text
    assert "nothing here" in text
    assert "loss of step 2" in text


def test_a_reason_that_runs_share_is_told_once(make_run: MakeRun) -> None:
    runs = [make_run(scheme, seed, failed=True) for scheme in ("exact", "smaq") for seed in (0, 1)]

    notes = accuracy_table(runs, "Which?").notes
    beside_another = accuracy_table([*runs[2:], make_run("exact")], "Which?").notes

    assert [note for note in notes if "nothing here" in note] == ["All rows: nothing-converted: nothing here"]
    assert [note for note in beside_another if "nothing here" in note] == [
        "tiny, smaq, seed 0; tiny, smaq, seed 1: nothing-converted: nothing here"
    ]


def test_runs_with_another_gpu_are_another_row(make_run: MakeRun) -> None:
    runs = [make_run(scheme, 0, accuracy, gpu=gpu) for gpu, scheme, accuracy in MIXED]

    rows = accuracy_table(runs, "Which?").rows

    assert [row["machine"] for row in rows] == ["box (T4)", "box (T4)", "box (H200)", "box (H200)"]
    assert [row["accuracy_difference"] for row in rows] == [None, pytest.approx(-0.1), None, pytest.approx(-0.3)]
