"""Language models of two layers with a loss of their own, for the tests of losses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.scheme.setup import TrainingSetup

CLASSES = 50


class Model(nn.Module):
    """A language model of two layers, whose loss is given."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], *, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle = nn.Embedding(CLASSES, 24), nn.Linear(24, 24)
        self.head, self.loss = nn.Linear(24, CLASSES, bias=bias), loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.middle(self.embed(ids))))
        return self.loss(logits, labels)


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def batch(rows: int = 3, length: int = 7) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (rows, length), generator=random)
    labels[0, 2:5] = -100
    return torch.randint(CLASSES, (rows, length), generator=random), labels


def result(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = model(*batch())
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def in_pieces(exact: nn.Module, pieces: int = 4) -> nn.Module:
    spec = f"chunked_loss:{pieces},head=head"
    return schemes.build(spec).apply(TrainingSetup(copy.deepcopy(exact))).module
