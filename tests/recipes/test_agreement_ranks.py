"""What the committed rows of the recipe ``agreement-ranks`` show."""

from __future__ import annotations

from pathlib import Path

import pytest

from actbench.model.measured import MeasuredRecord, Measurement
from actbench.report.store import read_results
from actbench.run import recipes

FOLDER = Path(__file__).parents[2] / "results" / "agreement-ranks"
CASES = sorted({(entry.case.model, entry.case.scheme) for entry in recipes.load("agreement-ranks").cases()})

COUNTER = 4  # bytes of a step counter
PARAMETERS = 65  # of the model that has most


@pytest.fixture(scope="module")
def committed() -> dict[tuple[str, str, str], Measurement]:
    """Give the rows of all machines; of a row of several, that of the last file."""
    files = sorted(FOLDER.glob("*.jsonl"))
    assert files, f"{FOLDER} holds no rows: 'torchrun --nproc-per-node 4 -m actbench sweep agreement-ranks' makes them"
    found = {}
    for record in (record for file in files for record in read_results(file, MeasuredRecord).records):
        assert isinstance(record.outcome, Measurement), record.outcome
        found[record.case.model, record.case.scheme, record.case.meter] = record.outcome
    return found


@pytest.mark.parametrize(("model", "scheme"), CASES)
def test_a_measured_rank_needs_what_is_simulated(
    committed: dict[tuple[str, str, str], Measurement], model: str, scheme: str
) -> None:
    measured, simulated = (committed[model, scheme, meter] for meter in ("cpu", "simulated"))

    assert measured.peak_bytes == pytest.approx(simulated.peak_bytes, rel=0.005)
    assert measured.weights_bytes == simulated.weights_bytes
    assert measured.optimizer_bytes is not None
    assert simulated.optimizer_bytes is not None
    # the first has most, but for step counters: the others may have pieces of more of a flat parameter's parameters
    counters = COUNTER * PARAMETERS if "fsdp1" in scheme else 0
    assert 0.99 * simulated.optimizer_bytes < measured.optimizer_bytes <= simulated.optimizer_bytes + counters
    assert max(measured.rank_peak_bytes, default=measured.peak_bytes) == measured.peak_bytes
    if measured.gradient_error is not None and "fewbit" not in scheme:
        assert measured.gradient_error < 1e-6
