"""4-bit NormalFloat with double quantization."""

from __future__ import annotations

import pytest
import torch

from actbench.methods.formats import encodings
from actbench.methods.formats.encodings import nf4

NF4 = encodings.build("nf4")
SEED = torch.tensor(0)

PUBLISHED = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
"""The data type as the paper's appendix lists it."""


def through(x: torch.Tensor) -> torch.Tensor:
    return NF4.decode(NF4.encode(x, SEED), x.shape, x.dtype)


def test_the_levels_are_the_published_ones() -> None:
    assert pytest.approx(PUBLISHED, abs=1e-6) == nf4.LEVELS


def test_a_parameter_takes_at_most_053_bytes() -> None:
    assert NF4.packed_bytes((4096, 14336), torch.bfloat16) / (4096 * 14336) == pytest.approx(0.5 + 1 / 64 + 4 / 16384)


def test_levels_come_back_as_they_are() -> None:
    """A group of levels has a largest magnitude of 1, and equal scales are their own bounds."""
    x = torch.tensor(nf4.LEVELS).repeat(64)

    assert torch.equal(through(x), x)


def test_every_number_becomes_the_nearest_level_of_its_group() -> None:
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    largest = x.abs().amax(1, keepdim=True)
    codes, scale_codes, words = NF4.encode(x, SEED)
    scales = NF4.decode((torch.full_like(codes, 0xFF), scale_codes, words), x.shape, torch.float32)  # all of level 1
    nearest = (x[..., None] / largest[..., None] - torch.tensor(nf4.LEVELS)).abs().argmin(-1)

    found = NF4.decode((codes, scale_codes, words), x.shape, torch.float32)

    torch.testing.assert_close(found, torch.tensor(nf4.LEVELS)[nearest] * scales)
    half_a_step = (largest.max() - largest.min()) / 255 / 2
    assert ((scales - largest).abs() <= half_a_step + largest.max() * 2**-8).all()  # bounds are bfloat16


@pytest.mark.parametrize("count", [1, 63, 65, 1000, 16385])
def test_pieces_of_any_size_give_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(1))
    whole, parts = through(x), NF4.encode(x, SEED)

    monkeypatch.setattr(nf4, "_PIECE", 128)

    assert all(torch.equal(one, other) for one, other in zip(NF4.encode(x, SEED), parts, strict=True))
    assert torch.equal(through(x), whole)
