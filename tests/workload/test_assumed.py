"""Losses that look at values, on tensors that have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actbench.measuring.bench import Session
from actbench.model.records import Case

Write = Callable[..., Path]


@pytest.mark.parametrize(
    "scheme",
    ["gact:L1", *(pytest.param(spec, marks=pytest.mark.sampled(slow=1)) for spec in ("coat", "smaq", "encode:int8"))],
)
def test_ctc_losses_are_simulated_under_packing_hooks(write_config: Write, scheme: str) -> None:
    folder = str(write_config("Wav2Vec2ForCTC"))
    case = Case(model=folder, scheme=scheme, batch_size=1, gradient_quality=False, meter="cpu")
    fields = {"meter": "simulated", "device_profile": "cpu"}
    cpu, simulated = (Session(each).memory() for each in (case, case.model_copy(update=fields)))

    assert simulated.activation_bytes == cpu.activation_bytes
    assert not [warning for warning in cpu.warnings if "are unknown" in warning]
