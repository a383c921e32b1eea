import pytest
import torch

from actbench.methods.formats.encodings import build
from actbench.methods.formats.encodings.encoding import E4M3, E5M2, FP16, bf16_stochastic
from actbench.ops import noise
from actbench.ops.rounding import lanes, stochastic

SEED = torch.tensor(7)
FORMATS = (FP16, E4M3, E5M2)
COPIES = 4096


def every_number(dtype):
    """Return all finite numbers of a type, as float32."""
    width = torch.int16 if dtype.itemsize == 2 else torch.uint8
    info = torch.iinfo(width)
    numbers = torch.arange(info.min, info.max + 1).to(width).view(dtype).float()
    return numbers[numbers.isfinite()]


def test_lanes_are_the_noise_of_the_operators():
    for bits in (16, 32):
        assert torch.equal(lanes(SEED, 1001, bits), noise.lanes(7, 0, 1001, bits, SEED.device))


def test_whole_numbers_nan_and_infinities_stay():
    x = torch.tensor([0.0, -3.0, 2.0**30, torch.inf, -torch.inf, torch.nan]).repeat(100)

    assert torch.equal(stochastic(x, SEED).nan_to_num(0.5), x.nan_to_num(0.5))


@pytest.mark.parametrize("to", FORMATS, ids=str)
def test_numbers_of_the_format_stay(to):
    x = every_number(to.dtype)

    assert torch.equal(to.stochastic(x, SEED).float(), x)
    assert torch.equal(to.nearest(x).float(), x)


def test_numbers_of_bfloat16_stay_and_infinities_too():
    x = every_number(torch.bfloat16)
    ends = torch.tensor([torch.inf, -torch.inf])

    assert torch.equal(bf16_stochastic(x, SEED).float(), x)
    assert torch.equal(bf16_stochastic(ends, SEED).float(), ends)
    assert bf16_stochastic(torch.full((1000,), torch.nan), SEED).isnan().all()


@pytest.mark.parametrize("to", FORMATS, ids=str)
def test_a_number_between_two_of_the_format_becomes_one_of_them_without_bias(to):
    numbers = every_number(to.dtype).unique()
    low, high = numbers[:-1], numbers[1:]
    few = torch.linspace(0, len(low) - 1, 60).long()  # from the most negative over subnormal numbers to the largest
    low, high = low[few], high[few]
    share = torch.rand(60, generator=torch.Generator().manual_seed(0))
    x = low + share * (high - low)
    found = to.stochastic(x.repeat(COPIES), SEED).float().view(COPIES, 60)

    assert ((found == low) | (found == high)).all()
    up = (x - low).double() / (high - low).double()
    error = ((found == high).double().mean(0) - up) / (up * (1 - up) / COPIES).sqrt()
    assert error.abs().max() < 4.5


@pytest.mark.parametrize("spec", ["bf16", "fp16"])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 3e-41])
def test_stochastic_halves_have_no_bias(spec, scale):
    x = scale * torch.randn(50, generator=torch.Generator().manual_seed(1))
    many = build(f"{spec},rounding=stochastic").encode(x.repeat(COPIES), SEED)[0].double().view(COPIES, 50)
    nearest = torch.stack([many.min(0).values, many.max(0).values])
    gap = nearest[1] - nearest[0]

    # Of both sides of x, a share that makes it the mean; where only one was ever drawn, x is close to that.
    assert ((nearest[0] <= x) & (x <= nearest[1]) | (gap == 0)).all()
    deviation = many.std(0) / COPIES**0.5
    step = 2.0**-24 if spec == "fp16" else 2.0**-133
    assert ((many.mean(0) - x).abs() <= 4.5 * deviation + torch.maximum(gap, torch.tensor(step)) * 20 / COPIES).all()


@pytest.mark.parametrize(("spec", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_nearest_is_torch(spec, dtype):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-45, 38, 5000)

    assert torch.equal(build(spec).encode(x, SEED)[0], x.to(dtype))


def test_overflow_is_infinite():
    x = torch.tensor([7e4, -7e4, 65519.0]).repeat(50)
    out = build("fp16,rounding=stochastic").encode(x, SEED)[0]

    assert out[x.abs() > 65536].isinf().all()
    assert torch.equal(out[x.abs() > 65536].sign().float(), x[x.abs() > 65536].sign())
    assert set(out[x == 65519].tolist()) == {65504.0, torch.inf}
