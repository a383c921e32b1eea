"""Up to which magnitude finite values stay finite: at an encoding's bound, just below it and just above."""

import itertools
import math

import pytest
import torch

from actbench.methods.formats.encodings import COMPARED, ENCODINGS, build
from actbench.methods.formats.encodings.encoding import at_most
from actbench.ops.library import DTYPES

SEED = torch.tensor(7)
SPECS = (
    *COMPARED,
    "bf16,rounding=stochastic",
    "fp16,rounding=stochastic",
    "fp8:e4m3,rounding=stochastic,scale=bfloat16,group_size=64",
    "fp8:e5m2,scale=none",
    "s2fp8,rounding=stochastic",
    "int:2,group_size=32",
    "nf4",
    "int:3,rounding=stochastic",
    "smaq,main_bits=3,outlier_bits=3,outliers=0,block=64",
    "smaq,outliers=1",
    "smaq_simulated,main_bits=3,outlier_bits=3",
    "smaq_simulated,statistics=sample",
    "smaq_simulated,statistics=range,rounding=truncate",
    "nnwbdi,bits=2",
)
COUNT = 2055  # whole groups and blocks, and a rest
MANY = 1 << 20  # of numbers that are rounded at random, so that some go up


def precision(dtype):
    """Return the type whose numbers bounds are: float64 is bounded as float32 is."""
    return torch.float32 if dtype == torch.float64 else dtype


def neighbour(bound, dtype, up):
    """Return the number of a type, of float32 for float64, beside a positive one, also beyond float32's largest."""
    if not up:
        return at_most(math.nextafter(bound, 0.0), dtype)
    return bound + math.ldexp(torch.finfo(precision(dtype)).eps, math.frexp(bound)[1] - 1)


def beside(most, dtype):
    """Yield tensors whose largest magnitude is ``most``, among what may be beside it in a tensor."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([most, -most], dtype=torch.float64)
    signs = torch.randint(2, (COUNT,), generator=generator)
    noise = torch.rand(COUNT, generator=generator, dtype=torch.float64)
    few = torch.randint(COUNT, (COUNT // 100,), generator=generator)
    yield ends[signs]
    yield ends[:1].expand(COUNT)
    yield ends[1:].expand(COUNT)
    for share in (noise, noise.pow(200)):
        yield ends[signs] * share.index_fill(0, few[:1], 1.0)
    for others in (0.0, 1.0, 1e-6, 1e-30):
        x = others * torch.randn(COUNT, generator=generator, dtype=torch.float64)
        yield x.index_copy(0, few, ends[signs[few]])
        yield x.index_copy(0, few[:1], ends[:1])


def through(encoding, x):
    return encoding.decode(encoding.encode(x, SEED.to(x.device)), x.shape, x.dtype)


def test_every_encoding_is_tried():
    assert {build(spec).name for spec in SPECS} == set(ENCODINGS)


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=[pytest.mark.slow] * (dtype == torch.float64)) for dtype in DTYPES]
)
@pytest.mark.parametrize("spec", SPECS)
def test_a_tensor_within_the_bound_comes_back_finite(spec, dtype):
    encoding = build(spec)
    largest = encoding.largest(dtype)
    assert 0 < largest <= torch.finfo(precision(dtype)).max
    assert torch.tensor(largest, dtype=dtype).item() == largest

    for most in (largest, neighbour(largest, dtype, up=False)):
        for x in beside(most, dtype):
            x = x.to(dtype)
            assert x.abs().max() == most
            assert through(encoding, x).isfinite().all()


def bounded():
    """Return stored encodings and types that have a number above the bound."""
    pairs = itertools.product((spec for spec in SPECS if build(spec).stored), DTYPES)
    return [(spec, dtype) for spec, dtype in pairs if above(spec, dtype) <= torch.finfo(dtype).max]


def above(spec, dtype):
    return neighbour(build(spec).largest(dtype), dtype, up=True)


@pytest.mark.sampled(fast=12, slow=10)
@pytest.mark.parametrize(("spec", "dtype"), bounded())
def test_a_number_above_the_bound_is_lost_on_one_side_or_the_other(spec, dtype):
    encoding = build(spec)

    x = torch.full((MANY if "stochastic" in spec else 64,), above(spec, dtype), dtype=torch.float64).to(dtype)
    found = [through(encoding, values) for values in (x, -x)]
    assert x.isfinite().all()
    assert not all(one.isfinite().all() for one in found)


def test_the_bounds():
    wide = torch.finfo(torch.float32).max
    half = torch.finfo(torch.float16).max
    brain = torch.finfo(torch.bfloat16).max

    assert build("fp16,rounding=stochastic").largest(torch.float32) == 65504 == half
    assert build("fp16").largest(torch.float32) == 65520 - 2.0**-8  # half a step of 32 above it, and one below that
    assert build("fp16").largest(torch.bfloat16) == 65536 - 256
    assert build("bf16,rounding=stochastic").largest(torch.float32) == brain
    assert build("bf16").largest(torch.float32) == brain + 2.0**119 - 2.0**104
    assert build("smaq").largest(torch.float32) == 2.0**123 - 2.0**99
    assert build("smaq").largest(torch.bfloat16) == 2.0**123 - 2.0**115
    for spec in ("fp8", "fp8:e5m2,scale=none", "s2fp8", "int:6", "nnwbdi"):
        bounds = [build(spec).largest(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)]
        assert bounds == [wide, half, brain, wide]


@pytest.mark.parametrize(
    ("bound", "dtype", "wanted"),
    [
        (1.0, torch.float32, 1.0),
        (math.nextafter(1.0, 0.0), torch.float32, 1 - 2.0**-24),
        (math.nextafter(1.0, 0.0), torch.float64, 1 - 2.0**-24),
        (1.9999, torch.bfloat16, 2 - 2.0**-7),
        (1e300, torch.float16, 65504.0),
        (torch.finfo(torch.float64).max, torch.float64, torch.finfo(torch.float32).max),
    ],
)
def test_the_largest_number_up_to_a_bound(bound, dtype, wanted):
    assert at_most(bound, dtype) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("nnwbdi")])
def test_a_tensor_within_the_bound_comes_back_finite_on_cuda(spec):
    encoding = build(spec)
    for dtype in DTYPES:
        for x in beside(encoding.largest(dtype), dtype):
            assert through(encoding, x.to("cuda", dtype)).isfinite().all()
