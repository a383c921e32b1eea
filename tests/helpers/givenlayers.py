"""Layers of the tests of methods: what stands before one, and the gradients of one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.scheme.setup import TrainingSetup


class Doubled(nn.Module):
    """Makes what the layer behind it is given: what a model is given itself is left as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def converted(module: nn.Module, spec: str) -> Any:
    """Return a copy of a module under a scheme."""
    return schemes.build(spec).apply(TrainingSetup(copy.deepcopy(module))).module


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the gradients of the input and the parameters, for weights of the output that are always the same."""
    x = x.clone().requires_grad_()
    y = layer(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()]))
