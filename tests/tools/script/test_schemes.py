"""Every scheme that a script can take runs in one of five architectures on a simulated card, or says why not."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from architectures import ARCHITECTURES, train
from torch import nn

import actbench
from actbench import scheme as schemes
from actbench.errors import ActbenchError
from actbench.measuring.meters.meter import MemoryReading
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter
from actbench.tools.script.experiment import APPLIED

CARD = "rtx-4060"
EXAMPLES = {"encode": "encode:int:6", "fewbit": "fewbit:3", "gact": "gact:L1", "randomized": "randomized:0.5"}
SPECS = tuple(
    EXAMPLES.get(name, name)
    for name in schemes.alone()
    if name != "exact" and set(schemes.lookup(name).model_construct().changes) <= APPLIED
)
OF_LINEAR = ("randomized:0.5", "dropit:0.25", "wtacrs:0.5", "float8:rowwise", "velora", "division:8")
"""Schemes that replace linear layers."""


@pytest.mark.usefixtures("operators_run_once")
@pytest.mark.sampled(fast=2, slow=12)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_script_runs_under_each_scheme_or_it_is_refused(spec: str, name: str) -> None:
    simulation = actbench.simulate(CARD, scheme=schemes.build(spec))
    with suppress(ActbenchError), simulation:
        train(name)
        raise AssertionError("the run did not end by itself")
    assert len(simulation.steps.done) >= 1  # a refusal comes after the first step, which has no scheme


@pytest.mark.usefixtures("operators_run_once")
@pytest.mark.sampled(fast=1, slow=6)
@pytest.mark.parametrize("name", ["llama", "roberta", "vit"])
@pytest.mark.parametrize("spec", OF_LINEAR)
def test_linear_layers_are_replaced_inside_of_a_script(spec: str, name: str) -> None:
    """Queries, keys and values read one input, which such a scheme packs once and finds again."""
    with actbench.simulate(CARD, scheme=schemes.build(spec)) as card:
        train(name)

    assert card.measurement.sites


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def setup_on(device: str) -> TrainingSetup:
    return TrainingSetup(
        nn.Sequential(Block(), Block(), nn.Linear(64, 8)).to(device),
        loss=lambda module, batch: module(batch["x"]).square().mean(),
        make_optimizer=lambda module: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]),
    )


def reading_by_the_meter(spec: str, profile: str) -> MemoryReading:
    meter = SimulatedMeter(profiles.get(profile))
    setup, batch = actbench.apply(meter.adopt(setup_on("cpu")), spec), {"x": torch.randn(4, 64)}
    with meter.active():
        return meter.memory(TrainStep(setup, meter.place(batch)))


def train_under(spec: str, device: str) -> None:
    step = TrainStep(actbench.apply(setup_on(device), spec), {"x": torch.randn(4, 64, device=device)})
    for _ in range(4):
        step()


ADAPTERS = ("lora:8", "lora:8,adapter=dora", "lora:8,adapter=vera", "lora:8,adapter=lora_fa", "lora:8,adapter=lokr")


@pytest.mark.sampled(fast=1, slow=5)
@pytest.mark.parametrize("profile", ["cpu", CARD])
@pytest.mark.parametrize("spec", [*ADAPTERS, "qlora", "lora:8+fewbit:3"])
def test_adapters_applied_inside_of_a_simulation_need_what_the_meter_says(spec: str, profile: str) -> None:
    expected = reading_by_the_meter(spec, profile)
    with actbench.simulate(profile) as card:
        train_under(spec, "cuda" if profile == CARD else "cpu")

    found = card.measurement
    assert found.weights_bytes == expected.weights_bytes
    assert found.optimizer_bytes == expected.optimizer_bytes
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.002)  # a loop holds the loss of the step before


@pytest.mark.parametrize("spec", ["exact", "lora:8"])
def test_a_training_that_stays_on_the_host_takes_nothing_of_the_card(spec: str) -> None:
    with actbench.simulate(CARD) as card:
        train_under(spec, "cpu")

    assert card.measurement.weights_bytes == card.measurement.gradients_bytes == 0
