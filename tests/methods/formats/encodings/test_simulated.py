"""SmaQ as published: the figures of an independent study of the authors' code, on N(0, 1)."""

import math

import pytest
import torch
from pydantic import ValidationError

from actbench.methods.formats.encodings import SmaqSimulated, build, snr_db
from actbench.methods.formats.encodings.simulated import moments

SEED = torch.tensor(7)
COUNT = 2**20


@pytest.fixture(scope="module")
def x():
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(0))


def kept(x, **fields):
    encoding = SmaqSimulated(**fields)
    return snr_db(x, encoding.decode(encoding.encode(x, SEED), x.shape, x.dtype))


def test_share_of_outliers_bits_and_ratio(x):
    bits = SmaqSimulated().counted_bits(x, SEED)

    assert (bits - 6) / 2 == pytest.approx(0.317, abs=0.002)
    assert bits == pytest.approx(6.635, abs=0.003)
    assert 32 / bits == pytest.approx(4.823, abs=0.0025)
    assert SmaqSimulated().packed_bytes(x.shape, x.dtype) == 4 * COUNT


@pytest.mark.parametrize(
    ("fields", "decibels", "tolerance"),
    [
        ({}, 32.7, 0.2),
        ({"rounding": "nearest"}, 35.7, 0.1),
        ({"rounding": "truncate"}, 29.7, 0.1),
        ({"clamp": True}, 25.3, 0.2),
        ({"clamp": True, "rounding": "nearest"}, 25.7, 0.2),
        ({"clamp": True, "outlier_threshold": 4.0, "rounding": "nearest"}, 35.0, 0.1),
        ({"clamp": True, "outlier_threshold": 4.0}, 32.0, 0.2),
        ({"clamp": True, "outlier_threshold": 8.0}, 29.4, 0.2),
    ],
)
def test_what_is_kept(x, fields, decibels, tolerance):
    assert kept(x, **fields) == pytest.approx(decibels, abs=tolerance)


@pytest.mark.sampled(fast=2, slow=1)
@pytest.mark.parametrize(
    ("main", "outlier", "bits", "stochastic", "nearest", "truncated", "clamped"),
    [
        (5, 7, 5.635, 26.1, 29.1, 23.2, 23.1),
        (4, 6, 4.635, 18.8, 21.8, 16.0, 18.1),
        (3, 5, 3.635, 9.3, 12.3, 6.9, 9.2),
        (3, 4, 3.318, 8.9, 11.9, 6.6, 8.9),
        (3, 3, 3.000, 6.5, 9.6, 5.1, 6.5),
    ],
)
def test_fewer_bits(x, main, outlier, bits, stochastic, nearest, truncated, clamped):
    fields = {"main_bits": main, "outlier_bits": outlier}

    assert SmaqSimulated(**fields).counted_bits(x, SEED) == pytest.approx(bits, abs=0.003)
    assert kept(x, **fields) == pytest.approx(stochastic, abs=0.1)
    assert kept(x, **fields, rounding="nearest") == pytest.approx(nearest, abs=0.1)
    assert kept(x, **fields, rounding="truncate") == pytest.approx(truncated, abs=0.1)
    assert kept(x, **fields, clamp=True) == pytest.approx(clamped, abs=0.1)


def test_fewer_than_three_bits_are_refused():
    with pytest.raises(ValidationError, match="main_bits"):
        SmaqSimulated(main_bits=2)
    with pytest.raises(ValidationError, match="outlier_bits"):
        SmaqSimulated(outlier_bits=2)
    with pytest.raises(ValidationError, match="must be above main_threshold=1"):
        SmaqSimulated(outlier_threshold=1)


def test_by_hand():
    # Mean 0, unbiased deviation 1: steps of 1/15 up to 1, of 1.5/63 beyond, where nothing ends the codes.
    z = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.5, -1.5, 0.03, -0.03])
    quantized = SmaqSimulated(rounding="nearest").quantized(z, torch.tensor(0.0), torch.tensor(1.0), SEED)
    clipped = SmaqSimulated(rounding="nearest", clamp=True)

    assert torch.allclose(quantized, torch.tensor([-1, 1, -1, 1, 1 + 21 / 42, -1 - 21 / 42, 0, 0]), atol=1e-6)
    far = torch.tensor([9.0, -9.0])
    assert torch.allclose(SmaqSimulated().quantized(far, torch.tensor(0.0), torch.tensor(1.0), SEED), far)
    assert clipped.quantized(far, torch.tensor(1.0), torch.tensor(2.0), SEED).tolist() == [6.0, -4.0]


def test_rounding_is_unbiased():
    x = torch.randn(64, generator=torch.Generator().manual_seed(3))
    encoding = SmaqSimulated()
    many = torch.stack([encoding.encode(x, torch.tensor(seed))[0] for seed in range(1000)]).double()
    error = many.mean(0) - x

    # Of a chance below 8 in 1000 perhaps none is seen; the larger step is a fifteenth of the deviation.
    assert (error.abs() <= 4 * many.std(0) / 1000**0.5 + x.std() / 15 * 8 / 1000).all()
    assert (many != many[0]).any(0).float().mean() > 0.9


@pytest.mark.parametrize("count", [2**10, 2**13, 2**16])
def test_range_overestimates_the_deviation(x, count):
    # The mean range of so many normal numbers: the integral of 1 - F**n - (1 - F)**n.
    below = 0.5 * (1 + torch.erf(torch.linspace(-8, 8, 16001, dtype=torch.float64) / math.sqrt(2)))
    mean_range = (1 - below**count - (1 - below) ** count).sum() * 1e-3
    expected = mean_range / math.sqrt(2 * math.log(count))
    found = torch.stack([moments(part, "range", 0, SEED)[1] for part in x.view(-1, count)]).double()

    assert 1.7 < expected < 1.9
    assert abs(found.mean() - expected) < 4 * found.std() / len(found) ** 0.5


@pytest.mark.parametrize(("samples", "bits", "decibels"), [(16, 6.725, 33.5), (256, 6.646, 32.8)])
def test_sampled_statistics(x, samples, bits, decibels):
    part = x[: 2**15]
    encoding = SmaqSimulated(statistics="sample", samples=samples)
    seeds = [torch.tensor(seed) for seed in range(24)]
    counted = torch.tensor([encoding.counted_bits(part, seed) for seed in seeds], dtype=torch.float64)
    heard = torch.tensor([snr_db(part, encoding.encode(part, seed)[0]) for seed in seeds])

    assert abs(counted.mean() - bits) < 4 * counted.std() / 24**0.5
    assert abs(heard.median() - decibels) < 4 * 1.25 * heard.std() / 24**0.5


def test_samples_are_different_elements():
    x = torch.arange(40.0)
    mean, deviation = moments(x, "sample", 40, SEED)
    some, _ = moments(x, "sample", 4, SEED)

    assert (mean, deviation) == (x.mean(), x.std(correction=0))
    assert 4 * some == (4 * some).round()
    assert some != moments(x, "sample", 4, torch.tensor(8))[0]


def test_small_and_constant_tensors_stay():
    small, constant = torch.randn(7), torch.full((50,), 3.25)
    encoding = SmaqSimulated()

    assert torch.equal(encoding.encode(small, SEED)[0], small)
    assert encoding.counted_bits(small, SEED) == 32
    assert torch.equal(encoding.encode(constant, SEED)[0], constant)
    assert encoding.counted_bits(constant, SEED) == 6


def test_second_moments_may_be_kept_above_zero():
    v = torch.randn(1000, generator=torch.Generator().manual_seed(0)).square()

    assert build("smaq_simulated").encode(v, SEED)[0].min() < 0
    assert build("smaq_simulated,nonnegative=true").encode(v, SEED)[0].min() == 0
