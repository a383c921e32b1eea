"""What loops keep until the next pass: outputs, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import NothingToConvertError
from actbench.measuring.bench import measure
from actbench.methods.loops import LateOptimizer
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup

GRADIENTS = 787_712  # bytes of them
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


@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_gradients_that_are_freed_late_fill_the_forward_pass(meter: str) -> None:
    device = {"meter": meter, "device_profile": "cpu" if meter == "simulated" else None, "sequence_length": 2}
    exact, late = measured("exact", **device), measured("late_zero_grad", **device)

    assert late.peak_bytes >= exact.peak_bytes
    assert late.gradients_bytes == exact.gradients_bytes == GRADIENTS
    assert late.loss == exact.loss


def test_the_forward_peak_grows_by_the_gradients_and_no_other() -> None:
    exact, late = (measured(scheme, device_profile="cpu") for scheme in ("exact", "late_zero_grad"))
    assert exact.phase_peaks is not None
    assert late.phase_peaks is not None

    assert late.phase_peaks.forward_bytes - exact.phase_peaks.forward_bytes == GRADIENTS
    assert late.phase_peaks.optimizer_bytes == exact.phase_peaks.optimizer_bytes


@pytest.mark.parametrize("scheme", ["late_zero_grad", "keep_outputs+late_zero_grad", "late_zero_grad+accumulate:2"])
def test_the_simulation_agrees_with_the_allocator(scheme: str) -> None:
    real, simulated = measured(scheme, meter="cpu"), measured(scheme, device_profile="cpu")

    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-4)
    assert simulated.activation_bytes == pytest.approx(real.activation_bytes, rel=1e-4)


def test_the_updates_are_the_same() -> None:
    def after(wrap: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().sum()
            if isinstance(optimizer, LateOptimizer):
                optimizer.forget()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    assert after(LateOptimizer).equal(after(lambda optimizer: optimizer))
