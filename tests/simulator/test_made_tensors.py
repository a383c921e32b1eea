"""What modules hold from step to step besides weights, such as the weight that old-style ``spectral_norm`` computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.meters.meter import MemoryReading
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

WIDTH = 300


class Watched(nn.Module):
    """A network that holds its last inner output, for somebody who looks at it later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.first(x).relu()
        return self.second(self.inner)


def normed(norm) -> nn.Module:
    layers = [norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    for layer in layers:
        vars(layer).pop("weight", None)  # made by each forward; the allocator's trace cannot tell who frees the first
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU())


MODELS = {
    "spectral_norm": lambda: normed(nn.utils.spectral_norm),
    "weight_norm": lambda: normed(nn.utils.weight_norm),
    "parametrized": lambda: normed(nn.utils.parametrizations.weight_norm),
    "watched": Watched,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name == "spectral_norm" else pytest.mark.slow) for name in MODELS]
)
def test_bytes_are_those_of_the_allocator(model: str, step_of) -> None:
    def reading(meter, module: nn.Module, rows: int) -> MemoryReading:
        return meter.memory(step_of(meter, module, lambda: {"x": torch.randn(rows, WIDTH)}))

    module, meter = MODELS[model](), SimulatedMeter(profiles.get("cpu"))
    for rows in (8, 500):  # the second finds what the first left
        simulated, measured = reading(meter, module, rows), reading(CpuMeter(), MODELS[model](), rows)
        assert simulated.activation_bytes == measured.activation_bytes
        assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.001)
