"""DeiT as timm builds it: one layer for query, key and value, attention written out, stochastic depth.

The authors' training keeps an averaged copy of the weights and AdamW without foreach, and its labels are soft.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEPTH, CLASSES, SIZE, PATCH, MOST_DROPPED = 12, 1000, 224, 16, 0.1


class Attention(nn.Module):
    """Attention over all patches, by products of matrices and a softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for patches of shape (batch, patches, width)."""
        batch, patches, width = x.shape
        shape = (batch, patches, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(-1)
        joined: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(batch, patches, width))
        return joined


class Block(nn.Module):
    """Attention and an MLP, each beside a residual path and skipped for some samples."""

    def __init__(self, width: int, heads: int, dropped: float) -> None:
        super().__init__()
        self.dropped = dropped
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return patches of the same shape."""
        x = x + self._skipped(self.attn(self.norm1(x)))
        return x + self._skipped(self.fc2(self.act(self.fc1(self.norm2(x)))))

    def _skipped(self, x: Tensor) -> Tensor:
        if not self.dropped:
            return x
        kept = torch.rand((len(x), 1, 1), dtype=x.dtype, device=x.device).add_(1 - self.dropped).floor_()
        return x.div(1 - self.dropped) * kept


class ViT(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (SIZE // PATCH) ** 2 + 1, width))
        dropped = [MOST_DROPPED * place / (DEPTH - 1) for place in range(DEPTH)]
        self.blocks = nn.Sequential(*(Block(width, heads, each) for each in dropped))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


class Averaged(nn.Module):
    """A model beside an averaged copy of its weights, which is not trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.average = model, copy.deepcopy(model).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        """Return the model's output."""
        return self.model(x)


def batch(samples: int) -> dict[str, Tensor]:
    """Return images and soft labels."""
    return {"images": torch.randn(samples, 3, SIZE, SIZE), "labels": torch.rand(samples, CLASSES)}


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy with soft labels."""
    return torch.sum(-batch["labels"] * F.log_softmax(module(batch["images"]), -1), -1).mean()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW without foreach."""
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3, foreach=False)


def build(width: int, heads: int) -> Any:
    """Return the model, its batches, loss and optimizer."""
    return Averaged(ViT(width, heads)), batch, loss, adamw


ti = partial(build, 192, 3)
s = partial(build, 384, 6)
b = partial(build, 768, 12)
