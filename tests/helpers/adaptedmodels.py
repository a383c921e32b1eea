"""Models that are adapted, for the tests of adapters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from actbench import workload as workloads
from actbench.model.records import Case
from actbench.scheme.setup import Batch, TrainingSetup
from actbench.workload.optimizers import make_optimizer

BOTH = ("lora", "qlora")


def built(model: str = "tiny-llama", **fields: Any) -> TrainingSetup:
    return workloads.load_workload(Case(model=model, batch_size=2, **fields)).setup(materialize=True, seed=0)


def batch(model: str = "tiny-llama", **fields: Any) -> Batch:
    return workloads.load_workload(Case(model=model, batch_size=2, sequence_length=16, **fields)).batch(2, seed=0)


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


class Net(nn.Module):
    """Two layers and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.classifier = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.second(self.first(x).relu()))
        return result


def setup_of(module: nn.Module) -> TrainingSetup:
    return TrainingSetup(
        module,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        make_optimizer=make_optimizer("adamw", lr=1e-2),
    )
