"""An MLP, and a loop that trains it as people do."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, ROWS = 512, 64
FLOAT = 4


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


WEIGHTS = 2 * (WIDTH * WIDTH + WIDTH) * FLOAT


def train(steps: int = 20, device: str = "cuda") -> nn.Module:
    """Train as people do."""
    module = model().to(device)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH)
        x = x.to(device, non_blocking=True)
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return module
