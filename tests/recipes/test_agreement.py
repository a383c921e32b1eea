"""What the committed rows of the recipes ``agreement`` and ``agreement-layouts`` show."""

from __future__ import annotations

from pathlib import Path

import pytest

from actbench.model.measured import MeasuredRecord, Measurement
from actbench.report.store import read_results
from actbench.run import recipes

RESULTS = Path(__file__).parents[2] / "results"
WORST = {"agreement": 0.005, "agreement-layouts": 0.02}
SHARED_OUT, OF_SHARES = ("gact:L2", "actnn:L3,bits="), 0.01
"""Schemes whose real tensors share out bits by values, which no simulation has; and how far these may be off."""


@pytest.mark.parametrize("recipe", WORST)
def test_the_simulated_peaks_of_every_row_are_near_the_measured_ones(recipe: str) -> None:
    models = {entry.case.model for entry in recipes.load(recipe).cases()}
    files = sorted((RESULTS / recipe).glob("*.jsonl"))
    assert files, f"'actbench sweep {recipe} -o results/{recipe}' makes the rows"
    for file in files:
        peaks: dict[str, dict[tuple[str, str], int]] = {"cpu": {}, "simulated": {}}
        for record in read_results(file, MeasuredRecord).records:
            assert isinstance(record.outcome, Measurement), record.outcome
            peaks[record.case.meter][record.case.model, record.case.scheme] = record.outcome.peak_bytes

        assert {model for model, _ in peaks["cpu"]} == models
        assert peaks["cpu"].keys() == peaks["simulated"].keys()
        for (model, scheme), peak in peaks["cpu"].items():
            worst = OF_SHARES if scheme.startswith(SHARED_OUT) else WORST[recipe]
            assert peaks["simulated"][model, scheme] == pytest.approx(peak, rel=worst), scheme
