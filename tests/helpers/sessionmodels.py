"""A network, and sessions that convert it as trainers do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.tools.trainers.session import ConvertedRun

WIDTH, ROWS = 64, 32


class Network(nn.Module):
    """Returns its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.layers(x))
        return {"logits": logits} if y is None else {"loss": (logits - y).square().mean(), "logits": logits}


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, WIDTH, generator=generator), "y": torch.randn(rows, 1, generator=generator)}


def open_session(model: nn.Module, spec: str, **settings: Any) -> ConvertedRun:
    return ConvertedRun(model, schemes.build(spec), **settings)


def step(model: nn.Module, rows: int = ROWS) -> None:
    model(**batch(rows))["loss"].backward()
