"""Batches of a script: another size where its loaders make them, and a refusal where none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainings import TRAINING, RunScript

from actbench.model.measured import Measurement
from actbench.model.records import Failure
from actbench.units import MIB


@pytest.mark.exhaustive
def test_a_script_without_a_loader_has_no_batch_to_replace(run: RunScript) -> None:
    loop = TRAINING.replace(
        TRAINING[TRAINING.index("for (x") : TRAINING.index("    hidden")],
        "for _ in range(9):\n    x = torch.randn(64, 256)\n",
    )

    found = run(loop, batch_size=128)

    assert isinstance(run(loop), Measurement)
    assert isinstance(found, Failure)
    assert "this script has no DataLoader that trains" in found.message


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("options", [{"batch_size": 128}, {"search": True}])
def test_a_batch_that_no_loader_makes_is_refused_at_the_first_step(
    run: RunScript, tmp_path: Path, options: dict[str, Any]
) -> None:
    loop = TRAINING.replace(
        TRAINING[TRAINING.index("for (x") : TRAINING.index("    hidden")],
        "for _ in range(9):\n    x = torch.randn(64, 256)\n    print('begins')\n",
    )
    found = run(loop, **options)

    assert isinstance(found, Failure)
    assert found.message == (
        "--batch-size and --max-batch change the batches of a DataLoader, and this script has no DataLoader that "
        "trains: set the batch in the script, or by the script's own argument, behind its name"
    )
    assert (tmp_path / "out").read_text().count("begins") == 1


@pytest.mark.slow
def test_the_batch_of_the_loader_is_replaced(run: RunScript) -> None:
    small, large = run(TRAINING, batch_size=64), run(TRAINING, batch_size=128)

    assert isinstance(small, Measurement)
    assert isinstance(large, Measurement)
    per_row = (large.activation_bytes - small.activation_bytes) / 64
    assert per_row == pytest.approx((2 * 1024 + 256) * 4, rel=0.01)


@pytest.mark.exhaustive
def test_the_largest_batch_is_found_and_proved(run: RunScript) -> None:
    found = run(TRAINING, search=True)

    assert isinstance(found, Measurement)
    searched = found.largest_batch_search
    assert searched is not None
    fitting, failing = (run(TRAINING, batch_size=searched.batch_size + more) for more in (0, 1))
    assert isinstance(fitting, Measurement)
    assert isinstance(failing, Measurement)
    assert (fitting.reserved_bytes or 0) <= 64 * MIB < (failing.reserved_bytes or 0)
