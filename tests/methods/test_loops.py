"""What loops keep until the next pass: outputs, and gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import ConversionError, NothingToConvertError
from actbench.measuring.bench import measure
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.methods.loops import LateOptimizer
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.scheme.retainedoutputs import RetainedOutputs
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

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


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_the_peak_grows_by_the_logits_of_a_step(meter: str) -> None:
    device = {"meter": meter, "device_profile": "cpu" if meter == "simulated" else None}
    exact, kept = measured("exact", **device), measured("keep_outputs", **device)

    assert kept.peak_bytes - exact.peak_bytes == LOGITS
    assert kept.activation_bytes == exact.activation_bytes
    assert kept.loss == exact.loss
    assert kept.gradients_bytes == exact.gradients_bytes


@pytest.mark.slow
def test_on_a_card_it_is_simulated_alike() -> None:
    exact, kept = (measured(scheme, device_profile="rtx-4090") for scheme in ("exact", "keep_outputs"))

    assert kept.peak_bytes - exact.peak_bytes == LOGITS


def test_a_model_that_trains_nothing_is_run_by_no_loop() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)

    with pytest.raises(NothingToConvertError, match="keep_outputs: Linear has no parameter to train; unfreeze one"):
        schemes.build("keep_outputs").apply(TrainingSetup(frozen))
    with pytest.raises(ConversionError, match="keep_outputs: a model brings no loop"):
        schemes.build("keep_outputs").apply(TrainingSetup(nn.Linear(2, 2)))


def small(scheme: str, wide: bool = False) -> TrainingSetup:
    """Return a model whose outputs are saved for the backward pass, or are those of a wide layer, which are not."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 16), nn.Dropout(0.5), nn.Linear(16, 64) if wide else nn.Sigmoid())
    plain = TrainingSetup(
        layers,
        lambda model, batch: model(batch["x"]).sum(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    return schemes.build(scheme).apply(plain)


SCHEMES = ["keep_outputs", "late_zero_grad", "keep_outputs+late_zero_grad"]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_held_over_does_not_lower_the_activations(scheme: str, wide: bool) -> None:
    def read(scheme: str) -> tuple[int, float | None]:
        torch.manual_seed(0)
        found = CpuMeter().memory(TrainStep(small(scheme, wide), {"x": torch.ones(24, 32)}))
        return found.activation_bytes, found.loss

    assert read(scheme) == read("exact")  # the loss too, of the same dropout


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nor_those_that_are_simulated(scheme: str, wide: bool) -> None:
    def read(scheme: str) -> int:
        meter = SimulatedMeter(profiles.get("cpu"))
        setup = meter.adopt(small(scheme, wide))
        with meter.active():
            return meter.memory(TrainStep(setup, meter.place({"x": torch.ones(24, 32)}))).activation_bytes

    assert read(scheme) == read("exact")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
def test_a_copy_of_what_is_held_is_empty(duplicate: Any) -> None:
    setup = small("keep_outputs")
    assert setup.retained_outputs is not None
    outputs = setup.module(torch.ones(2, 32))
    model = duplicate(setup.module)

    assert setup.retained_outputs.outputs is outputs
    (hook,) = model._forward_hooks.values()
    assert isinstance(hook.__self__, RetainedOutputs)
    assert hook.__self__.outputs is None
    assert torch.equal(model[0].weight, setup.module[0].weight)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_stay_as_zeros_are_kept_once(set_to_none: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = LateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad(set_to_none=set_to_none)

    assert len(list(optimizer.gradient_parts())) == (2 if set_to_none else 0)
    assert all((each.grad is None) == set_to_none for each in model.parameters())
    assert set_to_none or not any(each.grad.any() for each in model.parameters())


@pytest.mark.slow
def test_older_torch_kept_gradients_all_the_time() -> None:
    exact, late = (
        measured(scheme, device_profile="v100-16gb", torch_era="1.10") for scheme in ("exact", "late_zero_grad")
    )

    assert (late.peak_bytes, late.phase_peaks) == (exact.peak_bytes, exact.phase_peaks)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_gradients_that_are_freed_late_fill_the_forward_pass(meter: str) -> None:
    device = {"meter": meter, "device_profile": "cpu" if meter == "simulated" else None, "sequence_length": 2}
    exact, late = measured("exact", **device), measured("late_zero_grad", **device)

    assert late.peak_bytes > exact.peak_bytes  # so few activations that the forward pass has the peak
    assert late.activation_bytes == exact.activation_bytes
    assert late.gradients_bytes == exact.gradients_bytes == GRADIENTS
    assert late.loss == exact.loss


@pytest.mark.slow
def test_the_forward_peak_grows_by_the_gradients_and_no_other() -> None:
    exact, late = (measured(scheme, device_profile="cpu") for scheme in ("exact", "late_zero_grad"))
    assert exact.phase_peaks is not None
    assert late.phase_peaks is not None

    assert late.phase_peaks.forward_bytes - exact.phase_peaks.forward_bytes == GRADIENTS
    assert late.phase_peaks.optimizer_bytes == exact.phase_peaks.optimizer_bytes


@pytest.mark.sampled(slow=2)
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
