import math

import pytest
import torch

from actbench.methods.randomized.ops.sketch import samples
from actbench.methods.randomized.ops.sketch.samples import compress, project, row_norms, winners


def chi_square(drawn, chances):
    expected = len(drawn) * chances
    return float(((drawn.bincount(minlength=len(chances)) - expected).square() / expected).sum())


def test_uniform_draws_are_uniform():
    drawn = samples.uniform(torch.tensor(5), 10, 20_000)

    assert chi_square(drawn, torch.full((10,), 0.1)) < 28  # 9 degrees of freedom: exceeded once in a thousand


def test_distinct_draws_are_distinct_and_every_pair_is_as_likely():
    drawn = torch.stack([samples.distinct(torch.tensor(seed), 4, 2) for seed in range(3000)])
    pairs = drawn[:, 0] * 4 + drawn[:, 1]
    possible = torch.tensor([0.0 if i == j else 1 / 12 for i in range(4) for j in range(4)])

    assert bool((drawn[:, 0] != drawn[:, 1]).all())
    assert chi_square(torch.unique(pairs, return_inverse=True)[1], possible[possible > 0]) < 31  # 11 degrees of freedom


def test_fractions_are_from_0_to_below_1():
    found = samples.fractions(torch.tensor(2), 20_000)

    assert found.dtype == torch.float64
    assert float(found.min()) >= 0
    assert float(found.max()) < 1
    assert abs(float(found.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 20_000)


@pytest.mark.parametrize("kind", ["rows", "rows_distinct"])
def test_a_uniform_sketch_is_scaled_rows(kind):
    x = torch.arange(1.0, 21)[:, None]
    found = project(x, torch.tensor(0), 5, kind) / math.sqrt(20 / 5)

    assert set(found.flatten().round(decimals=4).tolist()) <= set(x.flatten().tolist())


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_rows_are_drawn_by_their_length_and_weighted_against_it(size):
    x = torch.diag(torch.arange(1.0, 9))
    sketch, chosen = compress(x, torch.tensor(4), size, "norm")

    for row, number in zip(sketch, chosen, strict=True):
        assert float(row[number]) == pytest.approx(36 / size)  # |x| / (k p) = sum |x| / k, whatever the row
        assert float(row.sum()) == float(row[number])
    many = torch.cat([compress(x, torch.tensor(seed), 7, "norm")[1] for seed in range(2000)])
    assert chi_square(many, torch.arange(1.0, 9) / 36) < 24.3  # 7 degrees of freedom


def brute_force_winners(norms, size):
    """The rule as it is written: the c with the least (1 - sum of the c largest p) / (k - c)."""
    chances = sorted((norms / norms.sum()).tolist(), reverse=True)
    return min(range(size), key=lambda kept: (1 - math.fsum(chances[:kept])) / (size - kept))


@pytest.mark.parametrize("power", [0.5, 1, 2, 5])
def test_the_winners_are_as_many_as_the_rule_says(power):
    norms = (torch.rand(40, dtype=torch.float64) + 0.01) ** power
    upto = norms.sort().values.cumsum(0)

    for size in (1, 2, 10, 39):
        assert int(winners(upto, size)) == brute_force_winners(norms, size)


def test_winners_are_kept_as_they_are_and_once():
    x = torch.ones(20, 2)
    x[[3, 11]] = torch.tensor([[90.0, 0], [0, 70]])
    sketch, chosen = compress(x, torch.tensor(0), 6, "wta")

    assert chosen[:2].tolist() == [3, 11]
    assert torch.equal(sketch[:2], x[[3, 11]])
    assert not {3, 11} & set(chosen[2:].tolist())
    torch.testing.assert_close(sketch[2:], torch.full((4, 2), 18 / 4))  # 18 rows of one length for 4 draws


@pytest.mark.parametrize("kind", ["norm", "wta"])
def test_rows_of_zeros_are_never_drawn_and_may_be_all(kind):
    x = torch.zeros(30, 3)
    assert torch.equal(compress(x, torch.tensor(0), 5, kind)[0], torch.zeros(5, 3))
    x[7] = 1
    sketch, chosen = compress(x, torch.tensor(0), 5, kind)

    torch.testing.assert_close(sketch.sum(0), torch.ones(3))
    assert all(int(number) == 7 for number, row in zip(chosen, sketch, strict=True) if row.any())


@pytest.mark.parametrize("kind", ["norm", "wta"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_not_hidden(kind, value):
    x = torch.ones(30, 3)
    x[4, 1] = value

    assert not compress(x, torch.tensor(0), 5, kind)[0].isfinite().all()


def test_row_norms_are_summed_in_parts_of_float32(monkeypatch):
    x = torch.full((10, 70_000), 2.0, dtype=torch.float16)  # in float16 the squares would overflow
    expected = torch.full((10,), math.sqrt(70_000 * 4), dtype=torch.float64)

    torch.testing.assert_close(row_norms(x), expected, rtol=1e-5, atol=0)
    monkeypatch.setattr(samples, "CHUNK_BYTES", 0)
    torch.testing.assert_close(row_norms(x), expected, rtol=1e-5, atol=0)
