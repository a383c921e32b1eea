"""A model of equal blocks, for tests that train it by a loop and by ``actbench measure``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, ROWS = 512, 1000, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(rows: int, device: str = "cpu") -> dict[str, Tensor]:
    return {"x": torch.randn(rows, WIDTH, device=device), "y": torch.randint(0, CLASSES, (rows,), device=device)}


def build() -> tuple[nn.Module, Callable[[int], dict[str, Tensor]], Callable[[Any, dict[str, Tensor]], Tensor]]:
    return Residual(), batch, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])
