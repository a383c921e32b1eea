"""Networks whose first process of several is read, on a simulated card."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.measuring import processgroup
from actbench.measuring.meters import MemoryReading
from actbench.scheme.conditions import Processes
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

FLOAT = 4
WIDTH, BLOCKS = 128, 4
RANKS = [2, 8, 64]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, bias: bool = True) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width, bias=bias), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.linear(x))
        return result


def uneven() -> nn.Module:
    """Parameters of 33, 128 and 7 rows: more and fewer than there are processes, and no multiples of them."""
    torch.manual_seed(0)
    first, last = (nn.Linear(5, 33), nn.LayerNorm(33), nn.Linear(33, WIDTH)), nn.Linear(WIDTH, 7)
    return nn.Sequential(*first, Block(), Block(), last)


def even(bias: bool = False) -> nn.Module:
    return nn.Sequential(*(Block(bias=bias) for _ in range(BLOCKS)))


def read(
    net: nn.Module, spec: str, inputs: int, optimizer: Callable[..., torch.optim.Optimizer], rows: int = 2
) -> MemoryReading:
    meter, step = prepared(net, spec, inputs, optimizer, rows)
    return meter.memory(step)


def prepared(
    net: nn.Module, spec: str, inputs: int, optimizer: Callable[..., torch.optim.Optimizer], rows: int = 2
) -> tuple[SimulatedMeter, TrainStep]:
    profile = replace(profiles.get("h100-80gb"), torch=(2, 14))  # workspaces that stay move no peak
    meter = SimulatedMeter(profile)
    setup = TrainingSetup(
        net,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        make_optimizer=lambda module: optimizer(module.parameters(), lr=0.1),
    )
    scheme = schemes.build(spec)
    with meter.operators():
        setup = replace(meter.adopt(setup), processes=Processes(processgroup.ALONE.mesh(scheme, meter)))
        setup = scheme.apply(setup)
        with meter.active():
            return meter, TrainStep(setup, meter.place({"x": torch.randn(rows, inputs)}))


def rows_of(parameter: Tensor, ranks: int) -> int:
    """Return the elements of the share of the first process: rows, rounded up."""
    return math.ceil(parameter.shape[0] / ranks) * math.prod(parameter.shape[1:])
