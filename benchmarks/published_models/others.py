"""What published benchmarks train: Swin V2 with soft labels, torch's Transformer, and a head of words alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, WORDS = 4096, 128256


def swin_batch(samples: int) -> dict[str, Tensor]:
    """Return images of 256 pixels and soft labels."""
    return {"images": torch.randn(samples, 3, 256, 256), "labels": torch.rand(samples, 1000)}


def smoothed(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy with smoothed labels."""
    return F.cross_entropy(module(batch["images"]), batch["labels"], label_smoothing=0.1)


def swin_v2_t() -> Any:
    """Return Swin V2 Tiny with torchvision's recipe."""
    model = torchvision.models.swin_v2_t(weights=None)
    return model, swin_batch, smoothed, lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without state."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Transformer(nn.Module):
    """torch.nn.Transformer with its defaults, batch in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the decoder's output for sources and targets of shape (batch, tokens, width)."""
        found: Tensor = self.model(source.transpose(0, 1), target.transpose(0, 1))
        return found


def transformer_batch(samples: int) -> dict[str, Tensor]:
    """Return sources of 10 tokens and targets of 20."""
    return {"source": torch.rand(samples, 10, 512), "target": torch.rand(samples, 20, 512)}


def squared(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean square of the output."""
    return (module(**batch) ** 2).mean()


def transformer() -> Any:
    """Return torch's Transformer, its batches, loss and SGD."""
    return Transformer(), transformer_batch, squared, sgd


class Head(nn.Module):
    """Hidden states, which get a gradient as in a larger model, and a linear layer from them to words.

    As in the script of the benchmark, the layer of the other implementation is in memory too.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(tokens, WIDTH, dtype=torch.bfloat16))
        self.lin = nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.bfloat16)
        self.other = nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.bfloat16)

    def forward(self) -> Tensor:
        """Return logits of shape (tokens, words)."""
        logits: Tensor = self.lin(self.hidden)
        return logits


def _labels(tokens: int, samples: int) -> dict[str, Tensor]:
    return {"labels": torch.randint(WORDS, (samples, tokens))}


def _of_words(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(module(), batch["labels"][0])


def head(tokens: int) -> Any:
    """Return a head of words with so many tokens in each micro-batch of one row, its loss and SGD."""
    return (
        Head(tokens),
        partial(_labels, tokens),
        _of_words,
        sgd,
    )


head_4096 = partial(head, 4096)
head_8192 = partial(head, 8192)
head_32768 = partial(head, 32768)
