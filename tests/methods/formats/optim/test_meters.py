"""What the meters see: bytes of state are the formula, steps on fake tensors are those on real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench import optim, workload as workloads
from actbench.measuring.meters import footprint
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.methods.formats.ops.smaq.format import SMAQ
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

WIDTH, HIDDEN = 128, 512
MATRICES = 2 * WIDTH * HIDDEN
BIASES = WIDTH + HIDDEN
FLOAT, COUNTERS = 4, 4 * 4  # of four parameters, each a float32
GIB = 1 << 30


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def step_of(meter, make_optimizer) -> TrainStep:
    setup = meter.adopt(TrainingSetup(mlp(), lambda m, b: m(b["x"]).square().mean(), make_optimizer))
    with meter.active():
        return TrainStep(setup, meter.place({"x": torch.randn(8, WIDTH)}))


@pytest.mark.parametrize("kind", ["cpu", "simulated cpu", "simulated cuda"])
@pytest.mark.parametrize(
    "encoding", ["smaq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int:6", "bf16"))]
)
def test_meters_see_the_bytes_of_the_formula(kind: str, encoding: str) -> None:
    meter = {
        "cpu": lambda: CpuMeter(GIB),
        "simulated cpu": lambda: SimulatedMeter(profiles.get("cpu")),
        "simulated cuda": lambda: SimulatedMeter(profiles.get("cuda-16gib")),
    }[kind]()
    reading = meter.memory(step_of(meter, lambda m: optim.AdamW(m.parameters(), encoding=encoding)))

    half = MATRICES // 2
    one = {"smaq": SMAQ.packed_bytes(half), "int:6": half * 6 // 8 + 4 * half // 64, "bf16": 2 * half}[encoding]
    counters = 0 if kind == "simulated cuda" else COUNTERS  # on the host beside a CUDA device
    assert reading.optimizer_bytes == 2 * (2 * one + BIASES * FLOAT) + counters


@pytest.mark.parametrize("meter", [CpuMeter(GIB), SimulatedMeter(profiles.get("cpu"))], ids=["cpu", "simulated"])
def test_the_peak_falls_by_what_the_state_takes_less_and_by_temporaries(meter) -> None:
    def peak(make_optimizer) -> int:
        return meter.memory(step_of(meter, make_optimizer)).peak_bytes

    exact = peak(lambda m: torch.optim.AdamW(m.parameters(), foreach=False))
    saved = 2 * MATRICES * FLOAT - 2 * SMAQ.packed_bytes(MATRICES)
    assert exact - peak(lambda m: optim.AdamW(m.parameters())) >= saved


def test_moments_of_roberta_base_take_at_most_1_7_bytes_a_parameter() -> None:
    meter = SimulatedMeter(profiles.get("cuda-16gib"))
    case = Case(model="roberta-base", scheme="exact", batch_size=1, meter="simulated", weights="random")
    with meter.active():
        module = workloads.load_workload(case).setup(materialize=False, seed=0).module
    setup = meter.adopt(TrainingSetup(module))
    count = sum(parameter.numel() for parameter in setup.module.parameters())
    with meter.active():
        optimizer = optim.AdamW(setup.module.parameters())
        for parameter in setup.module.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        state = [tensor for tensor in footprint.optimizer_state(optimizer) if tensor.dim()]

    small = sum(p.numel() for p in setup.module.parameters() if p.dim() < 2 or p.numel() < 4096)
    assert count > 124e6
    assert footprint.stored_bytes(state) == 2 * (SMAQ.packed_bytes(count - small) + FLOAT * small)
    assert footprint.stored_bytes(state) <= 1.7 * count
