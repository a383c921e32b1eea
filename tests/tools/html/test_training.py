"""Learning curves of training runs: points, charts and pictures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from actbench.errors import UsageError
from actbench.tools.html.charts import Picture, below_each_other
from actbench.tools.html.training import curves, groups_of, pictures_of
from actbench.tools.train.records import Evaluation

MakeRun = Any


def titles(picture: Picture) -> list[str]:
    """Return what the pointer shows of the points."""
    return [each.findtext("title") or "" for each in picture.chart.svg.findall("path[title]")]


def test_curves_are_means_over_seeds(make_run: MakeRun) -> None:
    runs = [make_run("exact", 0, losses=(2.0, 1.0)), make_run("exact", 1, losses=(4.0, 2.0)), make_run("smaq")]
    series = [("exact", [(1, 2.0), (2, 1.0)]), ("exact", [(1, 4.0), (2, 2.0)]), ("smaq", [(1, 3.0)])]

    (group,) = groups_of(runs)
    loss, accuracy = group.pictures

    assert curves(series) == {
        "exact": [(1, 3.0, pytest.approx(math.sqrt(2))), (2, 1.5, pytest.approx(math.sqrt(0.5)))],
        "smaq": [(1, 3.0, 0.0)],
    }
    exact = [title for title in titles(loss) if title.startswith("exact")]
    assert exact == ["exact\nstep 1\ntraining loss 3 ± 1.4", "exact\nstep 2\ntraining loss 1.5 ± 0.71"]
    assert any(title.startswith("smaq") for title in titles(loss))
    assert not any("±" in title for title in titles(loss) if title.startswith("smaq"))
    assert (loss.title, accuracy.title) == ("Training loss", "Accuracy on the validation set")


def test_a_value_that_is_no_number_is_a_gap(make_run: MakeRun) -> None:
    (group,) = groups_of([make_run(losses=(2.0, math.nan), diverged_at=2)])

    assert [title.split("\n")[1] for title in titles(group.pictures[0])] == ["step 1"]


def test_the_metric_of_ratings_is_the_correlation(make_run: MakeRun) -> None:
    run = make_run()
    judged = Evaluation(step=2, loss=1.0, correlation=0.9)
    outcome = run.outcome.model_copy(update={"metric": "correlation", "evaluations": (judged,)})

    assert groups_of([run.model_copy(update={"outcome": outcome})])[0].pictures[1].title.startswith("Correlation")


def test_pictures_are_drawn_and_the_same_each_time(make_run: MakeRun) -> None:
    pictures = pictures_of([make_run("exact", 0), make_run("$smaq$ <b>", 0)])
    svg = below_each_other(pictures)

    assert svg == below_each_other(pictures)
    assert svg.startswith("<svg")
    assert "tiny on digits: training loss" in svg
    assert "$smaq$ &lt;b&gt;" in svg
    assert "nan" not in svg.lower()


def test_where_nothing_was_trained_there_is_nothing_to_draw(make_run: MakeRun) -> None:
    with pytest.raises(UsageError, match="no run was trained to its end"):
        pictures_of([make_run(failed=True)])
