import types

import numpy as np
import pytest
import torch

from actbench.methods.randomized.ops import matrix as sketch
from actbench.methods.randomized.ops.matrix import KINDS, sketch_columns


def columns(first, count, dim, kind="gaussian", seed=11, dtype=torch.float32):
    return sketch_columns(torch.tensor(seed), first, count, dim, kind, dtype)


def test_the_gaussian_table_has_mean_0_and_mean_square_1():
    table = sketch.gaussian_table().astype(np.float64)

    assert table.shape == (65536,)
    assert np.all(np.diff(table) > 0)
    assert table.sum() == 0
    assert abs((table**2).mean() - 1) < 1e-8


def test_the_gaussian_table_is_the_normal_distribution():
    """The share of entries below each point is N(0, 1)'s, to within two slices."""
    table = torch.from_numpy(sketch.gaussian_table())

    for point in (-3.0, -1.0, -0.3, 0.0, 0.7, 2.0, 3.5):
        share = (table < point).double().mean()
        assert abs(share - torch.special.ndtr(torch.tensor(point, dtype=torch.float64))) < 1e-4


def test_fourth_moments():
    assert sketch.fourth_moment("rademacher") == 1
    assert 2.99 < sketch.fourth_moment("gaussian") < 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("first", "count", "dim"),
    [
        (0, 0, 5),
        (4, 3, 0),
        (0, 1, 1),
        (3, 7, 5),
        (1, 3, 1000),
        (5, 100, 333),
        (2**33, 3, 77),
        (17, 4, 2048),
        (1, 1, 2049),
    ],
)
def test_the_cpu_kernel_equals_the_reference_bit_for_bit(kind, first, count, dim):
    for seed in (0, -5, 2**63 - 1):
        expected = sketch.reference(torch.tensor(seed), first, count, dim, kind, torch.float32)

        assert torch.equal(columns(first, count, dim, kind, seed), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_made_in_chunks_are_the_columns_made_at_once(kind):
    whole = columns(0, 100, 37, kind)

    for step in (1, 3, 64, 99):
        parts = [columns(first, min(step, 100 - first), 37, kind) for first in range(0, 100, step)]
        assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_have_mean_0_mean_square_1_and_no_correlation(kind):
    entries = columns(0, 4000, 50, kind).double().t()
    flat = entries.flatten()
    error = 4.5 / len(flat) ** 0.5

    assert abs(flat.mean()) < error
    assert abs(flat.square().mean() - 1) < error * (sketch.fourth_moment(kind) - 1) ** 0.5 + 1e-8
    assert all(abs((flat[lag:] * flat[:-lag]).mean()) < error for lag in (1, 2, 3, 4, 16, 63, 64, 65))
    products = entries.t() @ entries / 4000 - torch.eye(50)
    assert (products - products.diag().diag()).abs().max() < 5 / 4000**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_other_types_are_the_rounded_float32_entries(kind):
    exact = columns(2, 30, 7, kind)

    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(columns(2, 30, 7, kind, dtype=dtype), exact.to(dtype))


def test_a_cuda_device_is_served_by_its_kernel_and_not_by_the_reference(monkeypatch):
    device = torch.device("cuda", 0)
    seed = types.SimpleNamespace(dtype=torch.int64, dim=lambda: 0, is_cuda=True, device=device)
    monkeypatch.setattr(sketch, "launching_maker", lambda *form: lambda seed: (seed, *form))
    sketch.maker.cache_clear()

    made = sketch._make(seed, 1, 2, 3, "gaussian", torch.float16)

    sketch.maker.cache_clear()
    assert made == (seed, 1, 2, 3, "gaussian", torch.float16, 1, device)
