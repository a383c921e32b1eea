"""Modules that call an activation or hold its layer, and what they save."""

import torch
from torch import nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.scheme.setup import TrainingSetup


class Calls(nn.Module):
    """Calls a function, on a tensor that it makes, so that it may be overwritten."""

    def __init__(self, function, **settings):
        super().__init__()
        self.function, self.settings = function, settings

    def forward(self, x):
        return self.function(x * 1, **self.settings)


class Holds(nn.Module):
    """Runs a layer in the same place."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x * 1)


def convert(module, spec="fewbit:3"):
    return schemes.build(spec).apply(TrainingSetup(module)).module


def saved_and_gradient(module, x):
    """Return output, gradient, and the shapes and types of what is saved."""
    kept = []
    torch.manual_seed(0)
    x = x.detach().clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.dtype, t.shape)) or t, lambda t: t):
        y = module(x)
    y.backward(torch.randn_like(y))
    return y, x.grad, kept


def same(one, other, x):
    for found, expected in zip(saved_and_gradient(one, x), saved_and_gradient(other, x), strict=True):
        if isinstance(expected, torch.Tensor):
            assert found.dtype == expected.dtype
            assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
        else:
            assert found == expected


LAYOUTS = {
    "contiguous": torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)) * 3,
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "numbers": torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -3.0, 3.0]),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(x)))
