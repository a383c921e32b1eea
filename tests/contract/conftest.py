"""Small networks of several layers, in which every scheme finds something to convert."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """A kind of network.

    Attributes:
        make: Makes one with an activation in it.
        inputs: What it is called with; not centred, so that no gradient is zero by chance.
    """

    make: Callable[[Callable[[], nn.Module]], nn.Module]
    inputs: Tensor


class Attention(nn.Module):
    """Self-attention written out, so that its second derivatives exist on every device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / math.sqrt(x.shape[-1])
        result: Tensor = self.out(scores.softmax(-1) @ self.value(x))
        return result


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.before, self.attention, self.middle = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), activation, nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        result: Tensor = x + self.mlp(self.middle(x))
        return result


def chain(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), activation(), nn.Linear(48, 32), activation(), nn.Linear(32, 32))


def transformer(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(Block(32, activation()), Block(32, activation()), nn.LayerNorm(32), nn.Linear(32, 16))


def convolutions(activation: Callable[[], nn.Module]) -> nn.Module:
    first = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), activation())
    second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), activation(), nn.AvgPool2d(2), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(128, 8))


def pooled(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 3), activation(), nn.MaxPool2d(2))


def alone(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(activation())


@pytest.fixture
def networks() -> dict[str, Network]:
    """Return the kinds of network by name."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(4, 16, 32, generator=random) + 0.5
    images = torch.randn(32, 4, 12, 12, generator=random) + 0.5
    return {
        "chain": Network(chain, features),
        "linear": Network(lambda _: nn.Sequential(nn.Linear(32, 32)), features),
        "activation": Network(alone, features),
        "norm": Network(lambda _: nn.Sequential(nn.LayerNorm(32)), features),
        "transformer": Network(transformer, features),
        "convolutions": Network(convolutions, images),
        "pooled": Network(pooled, images),
    }


@pytest.fixture
def seeded() -> Iterator[None]:
    """Draw the same numbers in each test."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what compiles a language model as slow; tests/methods/compile/test_compile.py compiles smaller networks."""
    here = Path(__file__).parent
    for item in items:
        callspec = getattr(item, "callspec", None)
        if (
            callspec is not None
            and item.path.is_relative_to(here)
            and str(callspec.params.get("spec", "")).startswith("compile:")
        ):
            item.add_marker(pytest.mark.slow)
