"""Where bits are shared out, what is simulated at an average is what real tensors take on that average."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

QUICK = ["actnn:L3,bits=2.5", "gact:L2,probes=8,bits=1.4"]
SLOW = [
    "actnn:L3,per_sample=false,bits=1.9",
    "actnn:L3,per_layer=false,bits=2.5",
    "gact:L2,probes=8,bits=2.5",
    "gact:L2,probes=8,bits=3.4",
]


def layers() -> nn.Module:
    widths = [3, 12, 20, 16]
    convolutions = [
        part
        for before, after in itertools.pairwise(widths)
        for part in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.Tanh())
    ]
    linear = [nn.Flatten(), nn.Linear(16 * 64, 200), nn.Tanh(), nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 10)]
    return nn.Sequential(*convolutions, *linear)


def attention() -> nn.Module:
    layer = [nn.TransformerEncoderLayer(32, 2, 96, 0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Flatten(2), nn.Linear(64, 32), *layer, nn.Flatten(), nn.Linear(96, 10))


def activation_bytes(meter, build, spec: str) -> int:
    torch.manual_seed(0)
    setup = meter.adopt(
        TrainingSetup(
            build(),
            lambda module, batch: F.cross_entropy(module(batch["x"]), batch["y"]),
            lambda module: torch.optim.SGD(module.parameters(), lr=0.01),
        )
    )
    setup = schemes.build(spec).apply(setup)
    with meter.active():
        batch = {"x": torch.randn(16, 3, 8, 8), "y": torch.randint(10, (16,))}
        return meter.memory(TrainStep(setup, meter.place(batch))).activation_bytes


@pytest.mark.parametrize("build", [layers, pytest.param(attention, marks=pytest.mark.sampled(slow=4))])
@pytest.mark.parametrize("spec", [*QUICK, *(pytest.param(spec, marks=pytest.mark.sampled(slow=4)) for spec in SLOW)])
def test_measured_over_simulated_is_one(spec, build) -> None:
    simulated = activation_bytes(SimulatedMeter(profiles.get("cpu")), build, spec)

    assert activation_bytes(CpuMeter(), build, spec) == pytest.approx(simulated, rel=0.02)
