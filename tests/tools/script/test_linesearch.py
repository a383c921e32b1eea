"""LBFGS on a simulated card, where no loss changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation

HISTORY, ITERATIONS = 6, 4


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_its_history_gets_as_long_as_asked_for(search: str | None) -> None:
    passes = 0
    with Simulation(profiles.get("rtx-4090"), steps=3) as card:
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 1)).cuda()
        optimizer = torch.optim.LBFGS(
            model.parameters(), max_iter=ITERATIONS, history_size=HISTORY, line_search_fn=search
        )
        x = torch.randn(256, 64, device="cuda")

        def closure() -> Tensor:
            nonlocal passes
            passes += 1
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    found = card.measurement
    assert found.optimizer_bytes is not None
    # the history has two vectors each time; beside it are a direction and the gradient before
    assert found.optimizer_bytes / found.weights_bytes == pytest.approx(2 * HISTORY + 2, rel=0.01)
    assert passes == 3 * ITERATIONS + (3 if search else 0)
