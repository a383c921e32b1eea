"""Networks that are compiled under a memory budget, and what is read of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.meters.meter import MemoryReading
from actbench.methods.compile.forward import CompiledForward
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep

EAGER = "backend=aot_eager_decomp_partition"


class Block(nn.Module):
    """A block of a transformer, without dropout unless it is asked for."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.before, self.middle, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        found: Tensor = x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.middle(x)))))
        return found


def transformer() -> nn.Module:
    return nn.Sequential(*(Block(32) for _ in range(3)), nn.LayerNorm(32), nn.Linear(32, 8))


def setup_of(module: nn.Module) -> TrainingSetup:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = model(batch["x"]).square().mean()
        return found

    return TrainingSetup(module, loss=loss, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0))


def compiled(module: nn.Module, spec: str = "compile:0.5") -> TrainingSetup:
    return schemes.build(f"{spec},{EAGER}").apply(setup_of(module))


def forward_of(module: nn.Module) -> CompiledForward:
    found = CompiledForward.of(module)
    assert found is not None
    return found


def read(setup: TrainingSetup, x: Tensor) -> MemoryReading:
    return CpuMeter().memory(TrainStep(setup, {"x": x}))


def gradients(setup: TrainingSetup, x: Tensor) -> list[Tensor]:
    setup.module.zero_grad()
    setup.forward({"x": x}).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in setup.module.parameters() if parameter.grad is not None]
