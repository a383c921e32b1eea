"""The signal-to-noise ratio of encodings, their bits, and the distributions that they are tried on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from actbench.methods.formats.encodings.encoding import Encoding, parts_bytes
from actbench.model.data import Data
from actbench.ops.noise import mixed

Distribution = Callable[[Generator, int], Tensor]
"""From a CPU generator and a count to (count,) float32."""


def normal(generator: Generator, count: int) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(count, generator=generator)


def _laplace(generator: Generator, count: int) -> Tensor:
    sides = torch.rand(2, count, generator=generator, dtype=torch.float64)
    # the difference of two exponential numbers is a Laplace number
    return torch.log1p(-sides[0]).sub(torch.log1p(-sides[1])).float()


def _student(generator: Generator, count: int) -> Tensor:
    squares = torch.randn(3, count, generator=generator).square().mean(0)
    # a normal number over the root of the mean of three squares has Student's distribution
    return normal(generator, count) / squares.sqrt()


DISTRIBUTIONS: Final[dict[str, Distribution]] = {
    "normal": normal,
    "tiny": lambda generator, count: 1e-6 * normal(generator, count),
    "laplace": _laplace,
    "student3": _student,
    "relu": lambda generator, count: normal(generator, count).relu(),
    "gelu": lambda generator, count: F.gelu(normal(generator, count)),
    "product": lambda generator, count: normal(generator, count) * normal(generator, count),
    "lognormal": lambda generator, count: 1e-8 * torch.exp(2 * normal(generator, count)),
}
"""By name: normal numbers; normal numbers times 1e-6, like gradients; Laplace; Student's t with 3 degrees of freedom;
ReLU and GELU of normal numbers; products of two normal numbers; and ``1e-8 exp(2 x)`` of normal x, like Adam's second
moments.
"""


class Quality(Data):
    """The quality of one encoding on one distribution.

    Attributes:
        encoding: The specification of the encoding.
        stored: False where the encoding only simulates.
        distribution: The name of the distribution.
        elements: How many numbers were encoded, as float32.
        bits: Bits per element of the parts, all metadata included.
        counted_bits: Bits per element that the authors count, where nothing is stored.
        snr_db: ``10 log10(sum x**2 / sum error**2)``, in decibels; infinite where nothing is lost.
    """

    encoding: str
    stored: bool
    distribution: str
    elements: int
    bits: float
    counted_bits: float | None
    snr_db: float


def snr_db(x: Tensor, restored: Tensor) -> float:
    """Return ``10 log10(sum x**2 / sum (restored - x)**2)``, summed in float64.

    Infinite where the two are equal; NaN where a value of either is not finite, or all of x is zero.
    """
    exact = x.double()
    signal, noise = exact.square().sum().item(), (restored.double() - exact).square().sum().item()
    if not (math.isfinite(signal) and math.isfinite(noise)) or signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def quality(encoding: Encoding, name: str, x: Tensor, seed: Tensor) -> Quality:
    """Encode and decode x, of at least one element, and return the quality."""
    parts = encoding.encode(x, seed)
    return Quality(
        encoding=encoding.spec,
        stored=encoding.stored,
        distribution=name,
        elements=x.numel(),
        bits=8 * parts_bytes(parts) / x.numel(),
        counted_bits=encoding.counted_bits(x, seed),
        snr_db=snr_db(x, encoding.decode(parts, x.shape, x.dtype)),
    )


def snr_table(
    encodings: Sequence[Encoding],
    distributions: Mapping[str, Distribution],
    seed: int,
    elements: int = 2**20,
    begins: Callable[[str], None] = lambda name: None,
) -> list[Quality]:
    """Return the quality of each encoding on each distribution, encoding after encoding.

    All encodings see the same ``elements`` numbers of each distribution; ``seed`` draws the numbers and the noise of
    rounding. ``begins`` is called with the name of each distribution.
    """
    noise = torch.tensor(seed)
    found: dict[tuple[int, str], Quality] = {}
    for name, draw in distributions.items():
        begins(name)
        x = draw(torch.Generator().manual_seed(mixed(seed)), elements)
        for place, encoding in enumerate(encodings):
            found[place, name] = quality(encoding, name, x, noise)
    return [found[place, name] for place in range(len(encodings)) for name in distributions]
