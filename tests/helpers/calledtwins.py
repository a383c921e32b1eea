"""Networks that call their activations as functions, and their twins that hold them as layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.scheme.setup import TrainingSetup

Function = Callable[[Tensor], Tensor]

SPECS: dict[str, tuple[Function, Callable[[], nn.Module]]] = {
    "fewbit:3": (F.gelu, nn.GELU),
    "fewbit:2,functions=tanh": (torch.tanh, nn.Tanh),
    "fewbit:1,functions=relu": (torch.relu, nn.ReLU),
    "invact": (F.silu, nn.SiLU),
    "regelu2": (F.gelu, nn.GELU),
    "resilu2": (F.silu, nn.SiLU),
}
SHAPES = [(4, 16, 32), (3, 7, 32), (1, 1, 32)]


class Called(nn.Module):
    """A network whose code calls an activation as a function between linear layers."""

    def __init__(self, function: Function, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.function(layer(x))
        return x


class Held(Called):
    """The same, in which a layer of the network computes the activation."""

    def __init__(self, layer: nn.Module, layers: int = 3) -> None:
        super().__init__(F.relu, layers)
        del self.function
        self.activation = layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.activation(layer(x))
        return x


def twins(spec: str) -> tuple[nn.Module, nn.Module]:
    """Return two networks of the same weights, of which one calls its activations and the other holds them."""
    function, layer = SPECS[spec]
    called = nn.Sequential(Called(function), nn.LayerNorm(32), Called(function, 2))
    held = nn.Sequential(Held(layer()), nn.LayerNorm(32), Held(layer(), 2))
    held.load_state_dict(called.state_dict())
    return called, held


def converted(model: nn.Module, spec: str) -> nn.Module:
    return schemes.build(spec).apply(TrainingSetup(model)).module


def converted_twins(spec: str) -> tuple[nn.Module, nn.Module]:
    called, held = twins(spec)
    return converted(called, spec), converted(held, spec)


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    (run or model)(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
