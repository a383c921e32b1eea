"""What codes in groups mean, whoever computes them: sizes, bounds, noise, and that they are unbiased."""

import pytest
import torch

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.groupquant import reference as groups
from actbench.ops import bitpack, noise
from actbench.ops.library import DTYPES

ops = torch.ops.actbench
SEED = torch.tensor(7)
SIZES = (0, 1, 7, 8, 31, 255, 256, 257, 5003)


def normal(count, dtype=torch.float32, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(x, bits, group_size=256, seed=SEED, stochastic=True, dtype=torch.float64):
    """Return x encoded and decoded, as a wide type, and the step of each element."""
    codes, meta = groupquant.encode(x, bits, group_size, seed, stochastic)
    steps = groupquant.ranges(meta).double() / (2**bits - 1)
    out = groupquant.decode(codes, meta, bits, group_size, 0, x.numel(), dtype)
    return out.double(), steps.repeat_interleave(group_size)[: x.numel()]


def test_codes_and_word_by_hand():
    codes, meta = groupquant.encode(torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0]), 2, 32, SEED)

    assert codes.tolist() == [0 | 1 << 2 | 2 << 4 | 3 << 6, 0]
    assert meta.tolist() == [0x4040 << 16]  # 3 as bfloat16, above 0
    assert groupquant.decode(codes, meta, 2, 32, 1, 3, torch.float32).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("group_size", "lanes"), [(32, 1), (64, 2), (96, 32), (256, 8), (1024, 32)])
def test_the_code_is_the_floor_of_place_and_noise(group_size, lanes):
    """Of places in 65536ths, half lie between two 32768ths: the sum with the noise becomes the even one."""
    groups_, generator = 3072 // group_size, torch.Generator().manual_seed(1)
    places = torch.randint(0, 3 * 2**16, (groups_, group_size), generator=generator)
    places[:, 0], places[:, 1] = 0, 3 * 2**16
    codes, _ = groupquant.encode((places / 2**16).flatten(), 2, group_size, SEED)
    random = noise.numbers(7, 0, groups_, lanes, torch.device("cpu"))[:, :group_size]

    sums = places + 2 * random
    sums = sums // 2 + sums % 2 * (sums // 2 % 2)
    assert torch.equal(bitpack.unpack(codes, 2, 3072), (sums >> 15).flatten())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_bytes_have_a_closed_form_and_errors_are_at_most_a_step(dtype, bits):
    for count in SIZES:
        x = 3 * normal(count, dtype) + 1
        for stochastic, most in ((True, 1), (False, 0.5)):
            codes, meta = groupquant.encode(x, bits, 256, SEED, stochastic)
            out, steps = whole(x, bits, stochastic=stochastic, dtype=dtype if dtype == torch.float64 else torch.float32)

            assert (codes.numel(), meta.numel()) == ((count * bits + 7) // 8, (count + 255) // 256)
            assert codes.nbytes + meta.nbytes == groupquant.packed_bytes(count, bits, 256)
            # Three roundings in float32 of numbers below 32, and noise in steps of 2**-15.
            assert ((out - x.double()).abs() <= most * steps * (1 + 2**-15) + 2**-17).all()


@pytest.mark.parametrize(
    ("x", "bits"),
    [
        pytest.param(normal(4096), 1, id="1 bit"),
        pytest.param(normal(4096), 2, id="2 bits"),
        pytest.param(normal(4096, torch.float16), 8, id="8 bits of float16"),
        pytest.param(10 + 0.05 * torch.rand(4096, generator=torch.Generator().manual_seed(2)), 2, id="far from zero"),
        pytest.param(-1000 + normal(4096).abs(), 4, id="far below zero"),
        pytest.param(normal(4096, torch.float64), 3, id="float64"),
    ],
)
def test_the_mean_over_seeds_is_the_element_and_the_variance_its_closed_form(x, bits):
    seeds = 30 if x.dtype == torch.float64 else 100
    runs = [whole(x, bits, seed=torch.tensor(seed)) for seed in range(seeds)]
    steps, errors = runs[0][1], torch.stack([out for out, _ in runs]) - x.double()
    low = groups.bounds_of(groupquant.encode(x, bits, 256, SEED)[1])[0].double().repeat_interleave(256)
    part = ((x.double() - low) / steps) % 1
    variance = part * (1 - part) * steps**2

    # The mean of a code is off by at most 2**-16 of a step, far below what so many runs can see.
    assert abs(errors.sum() / (seeds * variance.sum()).sqrt()) < 4.5
    seen = variance > 0.01 * steps**2
    scores = (errors.mean(0) / (variance / seeds).sqrt())[seen]
    assert abs((scores.square() - 1).mean()) < 6 * (2 / scores.numel()) ** 0.5
    assert abs(errors.square().mean() / variance.mean() - 1) < 0.03
    assert errors.square().mean() <= (steps**2 / 4).mean()


def test_the_nearest_code_is_biased_and_its_bias_would_be_seen():
    x = torch.full((256,), 0.2)
    x[0], x[1] = 0, 1
    stochastic = torch.stack([whole(x, 1, seed=torch.tensor(seed))[0] for seed in range(50)])
    nearest = torch.stack([whole(x, 1, seed=torch.tensor(seed), stochastic=False)[0] for seed in range(50)])

    error = (0.2 * 0.8 / (254 * 50)) ** 0.5
    assert abs(stochastic[:, 2:].mean() - 0.2) < 4.5 * error
    assert abs(nearest[:, 2:].mean() - 0.2) > 50 * error


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_groups_maximum_never_wraps_around(dtype):
    x = normal(2**17, dtype, seed=3)
    top = x.view(-1, 256).argmax(1)
    for bits in (1, 2, 4, 8):
        out, steps = whole(x, bits)
        errors = (out - x.double()).view(-1, 256).gather(1, top[:, None])[:, 0]
        assert (errors.abs() <= steps[::256] * (1 + 2**-15)).all()


def test_bounds_are_rounded_outwards_and_what_cannot_be_is_cut():
    large = torch.finfo(torch.float32).max
    x = torch.tensor([1.001, 1.002, -1.001, -1.002, large, -large, 2.0**-149, -(2.0**-149)])
    words = ops.groupquant_words(x.view(4, 2), 32).flatten()
    low, high = groups.bounds_of(words)
    most = torch.finfo(torch.bfloat16).max
    assert low.tolist() == [1.0, -1.0078125, -most, -(2.0**-133)]
    assert high.tolist() == [1.0078125, -1.0, most, 2.0**-133]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_the_largest_and_the_smallest_numbers_come_back_finite(dtype, bits):
    largest, least = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).max, 2.0**-133
    x = torch.tensor([largest, -largest, 0.0, largest / 2]).to(dtype)
    codes, meta = groupquant.encode(x, bits, 32, SEED)
    out = groupquant.decode(codes, meta, bits, 32, 0, 4, dtype)
    assert out.isfinite().all()
    assert (out[:2].double().abs() > 0.99 * largest).all()
    if dtype != torch.float16:
        tiny = torch.tensor([least, -least, 0.0]).to(dtype)
        assert (whole(tiny, bits, 32)[0].abs() <= least).all()
        assert torch.equal(whole(tiny, bits, 32)[0][:2], tiny[:2].double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_with_a_value_that_is_not_finite_is_nan_and_no_other(dtype):
    for special in (torch.nan, torch.inf, -torch.inf):
        x = normal(1000, dtype)
        x[300] = special
        out, _ = whole(x, 4)
        assert out[256:512].isnan().all()
        assert out[:256].isfinite().all()
        assert out[512:].isfinite().all()


def test_float64_beyond_float32_is_nan_and_not_another_number():
    assert whole(torch.tensor([1e39, 0.0], dtype=torch.float64), 2)[0].isnan().all()


def test_a_constant_group_is_exact_up_to_its_bounds():
    exact, _ = whole(torch.full((300,), -2.5), 1)
    assert (exact == -2.5).all()
    rounded, steps = whole(torch.full((300,), 3.14159), 1)
    assert ((rounded - 3.14159).abs() <= steps + 1e-6).all()
    assert whole(torch.tensor([0.0, -0.0]), 1)[1].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_any_part_is_the_part_of_the_whole(dtype, bits):
    codes, meta = groupquant.encode(normal(3001), bits, 96, SEED)
    everything = groupquant.decode(codes, meta, bits, 96, 0, 3001, dtype)
    for start, count in ((0, 0), (3001, 0), (1, 1), (95, 2), (96, 96), (101, 2000), (3000, 1)):
        assert torch.equal(
            groupquant.decode(codes, meta, bits, 96, start, count, dtype), everything[start : start + count]
        )
        out = torch.empty(count + 1, dtype=dtype)[1:]
        groupquant.decode_(out, codes, meta, bits, 96, start)
        assert torch.equal(out, everything[start : start + count])


def test_seeds_and_elements_have_noise_of_their_own():
    x = torch.full((4096,), 0.5)
    x[::256], x[1::256] = 0, 1
    one, same, other = (groupquant.encode(x, 1, 256, torch.tensor(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    differing = bitpack.unpack(one ^ other, 1, 4096).sum()
    assert abs(differing - 2032) < 5 * 4064**0.5 / 2
    halves = bitpack.unpack(one[:256] ^ one[256:], 1, 2048).sum()
    assert abs(halves - 1016) < 5 * 2032**0.5 / 2
