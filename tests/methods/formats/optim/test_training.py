"""Training with packed state ends where training with float32 state ends; with a second moment packed as it is, not."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import nn

from actbench import optim
from actbench.methods.formats.ops import smaq
from actbench.methods.formats.optim.storage import is_packed

SEEDS = (0, 1, 2)
OPTIMIZERS = {
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"lr": 3e-3}),
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
}


def with_linear_second_moment(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW whose second moment goes through SmaQ after each step as it is, and not as its root."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    seeds = iter(range(1_000_000))

    def requantize(*_: object) -> None:
        for parameter in filter(is_packed, module.parameters()):
            v = optimizer.state[parameter]["exp_avg_sq"]
            packed = smaq.encode(v.flatten(), torch.tensor(next(seeds)))
            v.copy_(smaq.decode(packed, v.numel(), torch.float32).view_as(v).clamp_(min=0))

    optimizer.register_step_post_hook(requantize)
    return optimizer


@pytest.mark.slow
def test_a_second_moment_on_a_linear_scale_trains_far_worse(losses: Callable[..., list[float]]) -> None:
    """See docs/decisions: its small values become zero, and a first moment divided by them goes anywhere."""
    exact = losses(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), steps=60)
    roots = losses(lambda m: optim.AdamW(m.parameters(), lr=1e-2), steps=60)
    linear = losses(with_linear_second_moment, steps=60)

    assert statistics.mean(exact[-5:]) < 1.3
    assert abs(statistics.mean(roots[-5:]) - statistics.mean(exact[-5:])) < 0.1
    assert not statistics.mean(linear[-5:]) < statistics.mean(exact[-5:]) + 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_300_steps_end_within_0_02_of_the_validation_loss_of_float32(name: str, validation_loss) -> None:
    ours, theirs, options = OPTIMIZERS[name]
    packed = [validation_loss(lambda m: ours(m.parameters(), **options), seed) for seed in SEEDS]
    exact = [validation_loss(lambda m: theirs(m.parameters(), **options), seed) for seed in SEEDS]
    assert abs(statistics.mean(packed) - statistics.mean(exact)) < 0.02, (packed, exact)
    assert statistics.mean(exact) < 1.5  # of 3.3 for knowing nothing
