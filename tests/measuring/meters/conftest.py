from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep

ROWS, WIDTH, HIDDEN = 64, 128, 512

MakeStep = Callable[..., TrainStep]


def squared_output(module: nn.Module, batch: Batch) -> Tensor:
    return module(batch["x"]).square().mean()


def class_loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


def own_loss(module: nn.Module, batch: Batch) -> Tensor:
    return module(**batch).loss


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


class Stepped:
    """Makes a step of a setup by a meter, as a bench does."""

    def __call__(self, meter, module: nn.Module, batch: Callable[[], Batch], loss=squared_output, make_optimizer=adamw):
        setup = meter.adopt(TrainingSetup(module, loss, make_optimizer))
        with meter.active():
            return TrainStep(setup, meter.place(batch()))


@pytest.fixture
def step_of() -> Stepped:
    return Stepped()


@pytest.fixture
def mlp() -> nn.Module:
    """Linear 128 to 512, GELU, Linear 512 to 128."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


@pytest.fixture
def rows() -> Callable[[], Batch]:
    """A batch of 64 rows of 128 float32."""
    return lambda: {"x": torch.randn(ROWS, WIDTH)}
