"""Learning curves of training runs: points, charts and pictures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from actbench.errors import UsageError
from actbench.tools.html import library
from actbench.tools.html.training import groups_of, pictures_of
from actbench.tools.train.records import Evaluation

MakeRun = Any
DRAWN = pytest.mark.skipif(not library.is_installed(), reason="vl-convert is not installed")


def test_curves_are_means_over_seeds(make_run: MakeRun) -> None:
    runs = [make_run("exact", 0, losses=(2.0, 1.0)), make_run("exact", 1, losses=(4.0, 2.0)), make_run("smaq")]

    (group,) = groups_of(runs)
    loss, accuracy = group.pictures
    points = loss.spec["data"]["values"]
    exact = [point for point in points if point["scheme"] == "exact"]

    assert [(point["step"], point["value"]) for point in exact] == [(1, 3.0), (2, 1.5)]
    assert [point["high"] - point["value"] for point in exact] == pytest.approx([math.sqrt(2), math.sqrt(0.5)])
    assert {point["scheme"] for point in points} == {"exact", "smaq"}
    assert all(point["low"] == point["high"] for point in points if point["scheme"] == "smaq")
    assert (loss.title, accuracy.title) == ("Training loss", "Accuracy on the validation set")


def test_a_value_that_is_no_number_is_a_gap(make_run: MakeRun) -> None:
    (group,) = groups_of([make_run(losses=(2.0, math.nan), diverged_at=2)])

    assert [point["step"] for point in group.pictures[0].spec["data"]["values"]] == [1]


def test_the_metric_of_ratings_is_the_correlation(make_run: MakeRun) -> None:
    run = make_run()
    judged = Evaluation(step=2, loss=1.0, correlation=0.9)
    outcome = run.outcome.model_copy(update={"metric": "correlation", "evaluations": (judged,)})

    assert groups_of([run.model_copy(update={"outcome": outcome})])[0].pictures[1].title.startswith("Correlation")


@DRAWN
def test_pictures_are_drawn_and_the_same_each_time(make_run: MakeRun, tmp_path: Path) -> None:
    pictures = pictures_of([make_run("exact", 0), make_run("$smaq$ <b>", 0)])
    svg = library.image(pictures, "svg")

    assert svg == library.image(pictures, "svg")
    assert svg.startswith(b"<svg")
    assert b"tiny on digits: training loss" in svg
    assert b"NaN" not in svg
    assert library.image(pictures[:1], "png").startswith(b"\x89PNG")


def test_where_nothing_was_trained_there_is_nothing_to_draw(make_run: MakeRun) -> None:
    with pytest.raises(UsageError, match="no run was trained to its end"):
        pictures_of([make_run(failed=True)])
