"""Stepping within the backward pass, with other optimizers and on both meters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError, SpecError
from actbench.measuring.bench import Session
from actbench.measuring.meters import footprint
from actbench.model.records import Case
from actbench.scheme.setup import TrainStep
from actbench.tools.convert import model as conversion

CASE = Case(model="tiny-llama@num_hidden_layers=6", batch_size=1, sequence_length=4, optimizer="adamw")


def weights(spec: str, steps: int = 3) -> list[torch.Tensor]:
    workload = workloads.load_workload(CASE)
    torch.manual_seed(0)
    step = TrainStep(schemes.build(spec).apply(workload.setup(materialize=True, seed=0)), workload.batch(1, seed=0))
    for _ in range(steps):
        step()
    return [parameter.detach() for parameter in step.setup.module.parameters()]


@pytest.mark.sampled(fast=2, slow=1)
@pytest.mark.parametrize("other", ["adam8bit", "smaq,on=state", "checkpoint", "pure"])
def test_updates_are_those_of_the_other_scheme_to_the_bit(other: str) -> None:
    assert all(map(torch.equal, weights(f"release+{other}"), weights(other)))


def measured(spec: str, **fields: Any) -> Any:
    return Session(CASE.model_copy(update={"scheme": spec, "gradient_quality": False, **fields})).memory()


@pytest.mark.parametrize("spec", ["release", pytest.param("release+adam8bit", marks=pytest.mark.sampled(slow=1))])
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adamw-fused", marks=pytest.mark.sampled(slow=1))])
def test_both_meters_see_no_gradient_and_the_same_peak(spec: str, optimizer: str) -> None:
    without = spec.removeprefix("release+") if "+" in spec else "exact"
    exact, cpu = (measured(each, meter="cpu", optimizer=optimizer) for each in (without, spec))
    simulated = measured(spec, device_profile="cpu", optimizer=optimizer)

    assert cpu.gradients_bytes == simulated.gradients_bytes == 0
    assert simulated.peak_bytes == pytest.approx(cpu.peak_bytes, rel=0.005)
    assert simulated.optimizer_bytes == cpu.optimizer_bytes == exact.optimizer_bytes
    assert cpu.peak_bytes < exact.peak_bytes


def test_the_peak_is_weights_state_and_little_else() -> None:
    """Of a batch of four tokens nearly nothing is kept for backward, so that what is left is a gradient or two."""
    largest = max(p.nbytes for p in workloads.load_workload(CASE).setup(materialize=True, seed=0).module.parameters())
    found = measured("release", meter="cpu")

    more = found.peak_bytes - found.weights_bytes - found.optimizer_bytes
    assert more < found.activation_bytes + 3 * largest
    assert found.optimizer == "AdamW"


def test_only_the_last_optimizer_of_a_setup_steps() -> None:
    workload = workloads.load_workload(CASE)
    setup = schemes.build("release").apply(workload.setup(materialize=True, seed=0))
    batch = workload.batch(1, seed=0)
    first, second = TrainStep(setup, batch), TrainStep(setup, batch)

    second()

    assert footprint.optimizer_state(first.optimizer) == []
    assert len(footprint.optimizer_state(second.optimizer)) > 0


def test_a_model_alone_and_a_second_scheme_of_gradients_are_refused() -> None:
    with pytest.raises(ConversionError, match="StepInBackward"):
        conversion.convert(torch.nn.Linear(2, 2), "release")
    with pytest.raises(SpecError, match="both take each gradient"):
        schemes.build("release+smaq,on=gradients")
    setup = workloads.load_workload(CASE).setup(materialize=True, seed=0)
    with pytest.raises(ConversionError, match="once a step"):
        TrainStep(schemes.build("release+encode:smaq_simulated,on=state").apply(setup), {})
