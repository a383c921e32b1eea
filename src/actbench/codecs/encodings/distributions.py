"""What encodings are tried on: numbers as layers, gradients and optimizers have them, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

Distribution = Callable[[Generator, int], Tensor]
"""From a CPU generator and a count to (count,) float32."""


def normal(generator: Generator, count: int) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(count, generator=generator)


def _tiny(generator: Generator, count: int) -> Tensor:
    return 1e-6 * normal(generator, count)


def _laplace(generator: Generator, count: int) -> Tensor:
    sides = torch.rand(2, count, generator=generator, dtype=torch.float64)
    return torch.log1p(-sides[0]).sub(torch.log1p(-sides[1])).float()


def _student(generator: Generator, count: int) -> Tensor:
    squares = torch.randn(3, count, generator=generator).square().mean(0)
    return normal(generator, count) / squares.sqrt()


def _relu(generator: Generator, count: int) -> Tensor:
    return normal(generator, count).relu()


def _gelu(generator: Generator, count: int) -> Tensor:
    return F.gelu(normal(generator, count))


def _product(generator: Generator, count: int) -> Tensor:
    return normal(generator, count) * normal(generator, count)


def _lognormal(generator: Generator, count: int) -> Tensor:
    return 1e-8 * torch.exp(2 * normal(generator, count))


DISTRIBUTIONS: Final[dict[str, Distribution]] = {
    "normal": normal,
    "tiny": _tiny,
    "laplace": _laplace,
    "student3": _student,
    "relu": _relu,
    "gelu": _gelu,
    "product": _product,
    "lognormal": _lognormal,
}
"""By name: normal; the same times 1e-6, as gradients are; Laplace; Student's t with 3 degrees of freedom; ReLU and
GELU of normal numbers; products of two of them; and 1e-8 times the exponential of twice one, as Adam's second moments
are."""
