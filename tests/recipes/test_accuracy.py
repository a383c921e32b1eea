"""What the committed training runs of the recipe ``accuracy`` show."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from actbench.report.store import read_results
from actbench.tools.train import recipe as runs
from actbench.tools.train.records import Trained, TrainingRun

FOLDER = Path(__file__).parents[2] / "results" / "accuracy"
POINT = 0.01
DIGITS = [section.model for section in runs.load("accuracy").train if section.data == "digits"]


@pytest.fixture(scope="module")
def committed() -> tuple[TrainingRun, ...]:
    """Give the runs of one machine: that of the first file."""
    files = sorted(FOLDER.glob("*.runs.jsonl"))
    assert files, f"{FOLDER} holds no runs: 'actbench train accuracy' makes them"
    return read_results(files[0], TrainingRun).records


def scores(found: tuple[TrainingRun, ...], model: str, scheme: str) -> list[float]:
    """Return the final accuracies of the recipe's runs, one for each seed."""
    wanted = {run.case.key() for run in runs.load("accuracy").runs("cpu")}
    outcomes = {
        run.case.seed: run.outcome
        for run in found
        if run.case.key() in wanted and (run.case.model, run.case.scheme) == (model, scheme)
    }
    assert sorted(outcomes) == [0, 1, 2, 3, 4], f"the recipe's runs of {model} with {scheme} are not all there"
    return [outcome.score for outcome in outcomes.values() if isinstance(outcome, Trained)]


@pytest.mark.parametrize("model", DIGITS)
@pytest.mark.parametrize("scheme", ["actnn:L3", "gact:L2"])
def test_two_and_four_bits_end_within_a_point_of_exact(
    committed: tuple[TrainingRun, ...], model: str, scheme: str
) -> None:
    exact, few_bits = (statistics.fmean(scores(committed, model, spec)) for spec in ("exact", scheme))

    assert exact > 0.95  # it has learned
    assert abs(few_bits - exact) < POINT


def test_there_are_two_models_on_digits() -> None:
    assert len(DIGITS) == 2
