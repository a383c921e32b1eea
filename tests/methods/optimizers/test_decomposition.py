"""The steps of GaLore and Fira that decompose gradients count, on every way to a peak."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from allocatedpeaks import allocated_peak
from torch import nn

import actbench
from actbench import optim, scheme as schemes
from actbench.measuring.bench import Session
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.meters.meter import Meter
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

OF_A_COPY = 60 * 60 * 4
"""Bytes in which torch transposes a matrix, block by block, which a simulation leaves out."""

SHAPE = (1024, 768)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, SHAPE[1], bias=False), nn.Linear(*SHAPE[::-1], bias=False))


def train(kind: str, steps: int, dtype: torch.dtype = torch.float32) -> None:
    model = network().to(dtype)
    make = getattr(optim, kind)
    optimizer = make(model.parameters(), [model[1].weight], rank=16, gap=3, lr=1e-3)
    for _ in range(steps):
        model(torch.randn(8, 64, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["GaLore", "Fira"])
def test_a_simulated_script_needs_what_a_step_with_a_decomposition_allocates(kind: str, dtype: torch.dtype) -> None:
    true = allocated_peak(lambda: train(kind, 7, dtype))
    with actbench.simulate("cpu") as card:
        train(kind, 7, dtype)

    # products of halves have buffers of oneDNN, which are not at this peak
    assert card.peak_bytes <= true <= card.peak_bytes + OF_A_COPY + 1024
    assert card.measurement.peak_phase == "optimizer"


def step_of(meter: Meter, scheme: str) -> TrainStep:
    setup = TrainingSetup(
        network(),
        loss=lambda module, batch: module(batch["x"]).square().mean(),
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters()),
    )
    with meter.active():
        batch = {"x": torch.randn(8, 64)}
        return TrainStep(schemes.build(scheme).apply(meter.adopt(setup)), meter.place(batch))


@pytest.mark.parametrize("scheme", ["galore:16", "fira:16", "release+galore:16", "release+fira:16"])
def test_both_meters_read_the_step_with_a_decomposition(scheme: str) -> None:
    readings = {}
    for meter in (CpuMeter(), SimulatedMeter(profiles.get("cpu"))):
        readings[meter.name] = meter.memory(step_of(meter, scheme))

    true, simulated = readings["cpu"].peak_bytes, readings["simulated"].peak_bytes
    vectors = 4 * (768 * 768 + 1024 * 768 + 768)  # of either side, beside the copy of the gradient that is overwritten
    assert simulated <= true <= simulated + OF_A_COPY + 1024
    assert simulated >= 4 * (64 * 768 + 2 * 1024 * 768) + vectors + 4 * 1024 * 768 * ("release" not in scheme)


def test_the_time_of_a_step_is_that_of_one_without() -> None:
    """Each of some 200 steps has it."""
    names = []
    for scheme in ("galore:16", "galore:16,gap=1"):
        meter = SimulatedMeter(profiles.get("rtx-4090"))
        assert meter.memory(step_of(meter, scheme)).estimated is not None
        names.append([done.work.name for done in meter.done])

    assert names[0] == names[1]
    assert not [name for name in itertools.chain(*names) if "svd" in name]


@pytest.mark.parametrize(("scheme", "marked"), [("galore:8", True), ("apollo:8", False)])
def test_a_simulated_card_says_that_the_workspace_is_not_known(scheme: str, marked: bool) -> None:
    fields: dict[str, Any] = {"model": "tiny-llama", "batch_size": 2, "sequence_length": 16, "gradient_quality": False}
    case = Case(**fields, scheme=scheme, meter="simulated", device_profile="rtx-4090")

    said = [reason for reason in Session(case).memory().approximate if "cuSOLVER" in reason]

    assert bool(said) is marked
    assert all("linalg_svd" in reason for reason in said)


def test_a_renewed_projection_is_that_of_the_next_gradient() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    weight = model[0].weight
    optimizer = optim.GaLore(model.parameters(), [weight], rank=4, gap=100)
    renewed = []
    for number in range(4):
        model(torch.randn(16, 64)).square().mean().backward()
        before = optimizer.state[weight].get("projection")
        if number == 2:
            optimizer.renew()
        optimizer.step()
        optimizer.zero_grad()
        renewed.append(optimizer.state[weight]["projection"] is not before)

    assert renewed == [True, False, True, False]
