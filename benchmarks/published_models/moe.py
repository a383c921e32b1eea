"""Mixtures of experts as transformers held them until version 4: each expert is three linear layers.

Which expert takes a token is decided by values; here each takes an equal part of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Expert(nn.Module):
    """A gated MLP of one expert."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output for the tokens of the expert."""
        found: Tensor = self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))
        return found


class LinearExperts(nn.Module):
    """Takes the place of a block of experts that are stacks of matrices."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.chosen = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(
            Expert(config.hidden_size, config.intermediate_size) for _ in range(config.num_local_experts)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the weighted sum of what the experts return, expert after expert."""
        tokens = hidden.flatten(0, -2)
        shares, _ = F.softmax(self.gate(tokens), dim=1, dtype=torch.float).topk(self.chosen, dim=-1)
        shares = (shares / shares.sum(-1, keepdim=True)).to(hidden.dtype)
        total, part = torch.zeros_like(tokens), len(tokens) * self.chosen // len(self.experts)
        for place, expert in enumerate(self.experts):
            own = torch.arange(place * part, (place + 1) * part, device=hidden.device) % len(tokens)
            ranks = torch.full_like(own, place % self.chosen)
            found = expert(tokens[None, own].flatten(0, 1)) * shares[own, ranks, None]
            total.index_add_(0, own, found.to(total.dtype))
        return total.view_as(hidden)


def with_linear_experts(model: Any) -> Any:
    """Return the model with experts of linear layers in each block, of the model's type."""
    for layer in model.model.layers:
        layer.mlp = LinearExperts(model.config).to(model.dtype)
    return model
