"""Outputs that a loop keeps until the next forward pass."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from actbench import scheme as schemes
from actbench.errors import NothingToConvertError
from actbench.measuring.bench import measure
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup

LOGITS = 8 * 64 * 512 * 4  # rows, tokens, vocabulary and bytes of float32


def measured(scheme: str, **fields: Any) -> Measurement:
    case = {
        "model": "tiny-llama",
        "batch_size": 8,
        "sequence_length": 64,
        "optimizer": "sgd",
        "gradient_quality": False,
    }
    return measure(Case.model_validate({**case, "scheme": scheme, **fields}))


@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_the_peak_grows_by_the_logits_of_a_step(meter: str) -> None:
    device = {"meter": meter, "device_profile": "cpu" if meter == "simulated" else None}
    exact, kept = measured("exact", **device), measured("keep_outputs", **device)

    assert kept.peak_bytes - exact.peak_bytes == LOGITS
    assert kept.loss == exact.loss
    assert kept.gradients_bytes == exact.gradients_bytes


def test_on_a_card_it_is_simulated_alike() -> None:
    exact, kept = (measured(scheme, device_profile="rtx-4090") for scheme in ("exact", "keep_outputs"))

    assert kept.peak_bytes - exact.peak_bytes == LOGITS


def test_a_model_that_trains_nothing_is_run_by_no_loop() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)

    with pytest.raises(NothingToConvertError, match="keep_outputs: Linear trains nothing"):
        schemes.build("keep_outputs").apply(TrainingSetup(frozen))
