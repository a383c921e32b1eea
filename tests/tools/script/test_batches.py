"""Batches of a script: another size where its loaders make them, and a refusal where none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainings import TRAINING, RunScript

from actbench.model.measured import Measurement
from actbench.model.records import Failure
from actbench.units import MIB, format_bytes


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
    told, _, line = found.message.rpartition(" (")
    assert told == (
        "--batch-size and --max-batch change the batches of a DataLoader, and this script has no DataLoader that "
        "trains: set the batch in the script, or by the script's own argument, behind its name"
    )
    assert line.endswith("optimizer.step())")
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


AHEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def ahead(loader):
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


for (x,) in ahead(DataLoader(TensorDataset(torch.randn(ROWS, 256)), batch_size=4096)):
    loss = model(x.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""A loop whose loader is one batch ahead, as accelerate's is; its last batch may be a smaller one."""


@pytest.mark.parametrize("batches", [2.5, pytest.param(1.5, marks=pytest.mark.slow)])
def test_the_largest_step_is_shown_with_its_rows_and_lines(run: RunScript, batches: float) -> None:
    found = run(AHEAD.replace("ROWS", str(int(4096 * batches))))

    assert isinstance(found, Measurement)
    assert found.built is not None
    assert found.built.batch_size == 4096
    assert found.peak_bytes == max(found.built.step_peaks) > 1.4 * min(found.built.step_peaks)
    assert found.timeline is not None
    assert all(holder.line for holder in found.timeline.holders if holder.kind == "saved")
    smallest, largest = (format_bytes(pick(found.built.step_peaks)) for pick in (min, max))
    assert f"Steps differ ({smallest} to {largest}); the largest is shown. --steps N runs more." in found.warnings
    has_state = any("began with the optimizer's state" in text for text in found.warnings)
    assert has_state == (batches < 2)  # the only step of so many rows is then the first one


@pytest.mark.slow
@pytest.mark.parametrize("meter", ["simulated", "cpu"])
def test_a_scheme_is_shown_in_the_largest_step_too(run: RunScript, meter: str) -> None:
    script = AHEAD.replace("ROWS", str(int(4096 * 2.5)))
    pasted = script.replace("optimizer =", 'import actbench\nmodel = actbench.convert(model, "fewbit:3")\noptimizer =')

    here, there = run(script, scheme="fewbit:3", meter=meter), run(pasted, meter=meter)

    assert isinstance(here, Measurement)
    assert isinstance(there, Measurement)
    assert here.built is not None
    assert here.built.batch_size == 4096
    assert here.peak_bytes == pytest.approx(there.peak_bytes, rel=1e-3)
    assert not any("optimizer's state" in text for text in here.warnings)  # which the first step has made
