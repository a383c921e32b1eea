"""A program that torchrun starts: schemes share a model out for a few steps, beside one process with all rows."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import actbench
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep

ROWS, STEPS = 6, 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.activation(self.linear(x))
        return result


class Adapted(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear.requires_grad_(False)
        self.adapter = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) + self.adapter(x)
        return result


def network(spec: str) -> nn.Module:
    """Return layers of 33 rows and 7, which two processes do not divide; with frozen ones if adapters are named."""
    torch.manual_seed(0)
    kind = Adapted if "adapters=" in spec else Block
    return nn.Sequential(nn.Linear(5, 33), kind(33), nn.LayerNorm(33), kind(33), nn.Linear(33, 7))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    error: Tensor = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    return error


def setup(spec: str) -> TrainingSetup:
    return TrainingSetup(
        network(spec),
        loss=loss,
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False),
    )


def batches(count: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    rows = ROWS * count
    return [
        {"x": torch.randn(rows, 5, generator=random), "y": torch.randint(7, (rows,), generator=random)}
        for _ in range(STEPS)
    ]


def trained(setup: TrainingSetup, given: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    step = TrainStep(setup, given[0])
    for batch in given:
        step.batch = batch
        step()
    flat = isinstance(setup.module, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(setup.module) if flat else nullcontext():
        return {name: _whole(parameter.detach()).clone() for name, parameter in setup.module.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(spec: str) -> None:
    rank, count = distributed.get_rank(), distributed.get_world_size()
    whole = batches(count)
    own = [{name: value[rank * ROWS : (rank + 1) * ROWS] for name, value in batch.items()} for batch in whole]

    alone = trained(setup(spec), whole)
    together = trained(actbench.apply(setup(spec), spec), own)

    assert together.keys() == alone.keys(), spec
    before = dict(network(spec).named_parameters())
    for name, parameter in together.items():
        assert torch.allclose(parameter, alone[name], rtol=1e-4, atol=1e-5), (spec, name)
        assert torch.allclose(parameter, before[name], atol=1e-3) != before[name].requires_grad, (spec, name)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    for given in sys.argv[1:]:
        check(given)
    distributed.destroy_process_group()
