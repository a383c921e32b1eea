"""At a vocabulary of 131,072 words the loss in pieces takes at most a sixth of the memory that the plain loss takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator.profiles import get
from actbench.simulator.simulated import SimulatedMeter
from actbench.simulator.tracker import StorageTracker

WORDS, WIDTH, TOKENS = 131_072, 8, 128


class Model(nn.Module):
    """A head, and a layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


def setup_of(spec: str) -> TrainingSetup:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(0)
    return schemes.build(spec).apply(TrainingSetup(Model(), loss=loss, make_optimizer=make))


def batch() -> Batch:
    random = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (TOKENS,), generator=random)
    return {"x": torch.randn(TOKENS, WIDTH, generator=random), "y": words}


def by_the_allocator(setup: TrainingSetup) -> int:
    reading = CpuMeter().memory(TrainStep(setup, batch()))
    return reading.peak_bytes - reading.weights_bytes


def simulated(setup: TrainingSetup) -> int:
    meter = SimulatedMeter(get("cpu"))
    setup = meter.adopt(setup)
    with meter.active():
        step = TrainStep(setup, meter.place(batch()))
    reading = meter.memory(step)
    return reading.peak_bytes - reading.weights_bytes


def by_storages(setup: TrainingSetup) -> int:
    """Return what operators return and nobody has let go of, at its most in both passes, of real tensors."""
    step = TrainStep(setup, batch())
    with StorageTracker() as ledger:
        ledger.add(setup.module.parameters())
        ledger.reset_peak()
        before = ledger.live_bytes
        step.backward(step.forward())
        return ledger.peak_bytes - before


@pytest.mark.parametrize("peak", [by_the_allocator, simulated, pytest.param(by_storages, marks=pytest.mark.slow)])
def test_the_loss_takes_a_sixth(peak: Callable[[TrainingSetup], int]) -> None:
    plain, chunked = peak(setup_of("exact")), peak(setup_of("chunked_loss:8,head=head"))

    assert plain > 2 * 4 * TOKENS * WORDS  # the logits and their softmax at least
    assert chunked <= plain / 6
