"""Noise for rounding is uniform, uncorrelated within and between seeds, and unbiased, as independent numbers are.

Scores are in standard deviations of what independent numbers would give. All draws are fixed: a score that passes
passes always, and the bounds are what a true generator exceeds once in some ten thousand tries.
"""

import pytest
import torch

from actbench.ops import noise

CPU = torch.device("cpu")
COUNT = 2**20
LAGS = (1, 2, 3, 7, 8, 9, 16, 32, 56, 63, 64, 65, 128, 192, 256, 512, 2048)
WIDTHS = (1, 2, 8, 32)
CELLS = 4096


def drawn(seed: int, width: int, count: int = COUNT) -> torch.Tensor:
    return noise.numbers(seed, 0, count // (32 * width), width, CPU).flatten()


def centred(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of mean 0 and variance 1."""
    return ((numbers + 0.5) / 2**noise.NOISE_BITS - 0.5) * 12**0.5


def excess(cells: torch.Tensor) -> float:
    """Return by how much the counts of cells are off from being equal."""
    expected = cells.numel() / CELLS
    square = (torch.bincount(cells, minlength=CELLS) - expected).square().sum() / expected
    return float(abs(square - (CELLS - 1)) / (2 * (CELLS - 1)) ** 0.5)


@pytest.mark.parametrize("width", WIDTHS)
def test_cells_and_pairs_of_cells_are_filled_alike(width):
    for seed in range(4):
        numbers = drawn(seed, width)
        assert excess(numbers >> 3) < 4.5
        for lag in (1, 8, 64, 256):
            assert excess((numbers[:-lag] >> 9) * 64 + (numbers[lag:] >> 9)) < 4.5


@pytest.mark.parametrize("width", WIDTHS)
def test_neighbours_far_and_near_are_not_correlated(width):
    for seed in range(4):
        x = centred(drawn(seed, width))
        for lag in LAGS:
            assert abs((x[:-lag] * x[lag:]).mean()) * (COUNT - lag) ** 0.5 < 4.5, lag


def test_seeds_are_not_correlated():
    """Nor are those whose states differ in one bit."""
    state = noise.mixed(1)
    related = [noise.unmixed(state ^ change) for change in (0, 1, 1 << 31, 1 << 32, 1 << 47, 1 << 63)]
    draws = [centred(drawn(noise.signed(seed), 8)) for seed in (2, 3, 4, *related)]
    for place, one in enumerate(draws):
        for other in draws[:place]:
            assert abs((one * other).mean()) * COUNT**0.5 < 4.5


@pytest.mark.parametrize("width", [1, 8])
def test_rounding_by_noise_has_no_bias_and_the_variance_of_independent_draws(width):
    seeds, count = 1000, 2**14
    generator = torch.Generator().manual_seed(9)
    x = 7 * torch.rand(count, generator=generator, dtype=torch.float64)
    weights = torch.randn(count, generator=generator, dtype=torch.float64)
    total, sums = torch.zeros(count, dtype=torch.float64), []
    for seed in range(seeds):
        errors = (x + (drawn(seed, width, count) + 0.5) / 2**15).floor() - x
        total += errors
        sums.append((errors * weights).sum())

    part = x % 1
    variance = part * (1 - part)
    scores = (total / (seeds * variance.clamp(min=1e-3)).sqrt())[variance > 0.01]
    assert abs(scores.mean()) * scores.numel() ** 0.5 < 4.5
    assert abs(scores.square().mean() - 1) < 4.5 * (2 / scores.numel()) ** 0.5
    assert scores.abs().max() < 6
    # The variance over seeds of a weighted sum over elements: no covariance hides in it.
    ratio = torch.stack(sums).var() / (variance * weights.square()).sum()
    assert abs(ratio - 1) < 3 * (2 / seeds) ** 0.5
