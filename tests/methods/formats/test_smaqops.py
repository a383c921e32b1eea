"""What packed SmaQ is, whoever computes it: bytes, errors, bounds, outliers, and that the mean over seeds is exact."""

import pytest
import torch

from actbench.methods.formats.ops import smaq
from actbench.methods.formats.ops.smaq import reference as smaqblocks
from actbench.methods.formats.ops.smaq.format import Format, format_of
from actbench.ops import bitpack
from actbench.ops.library import DTYPES

ops = torch.ops.actbench
SEED = torch.tensor(7)
USUAL = Format(6, 7, 64, 256)
FORMS = (USUAL, Format(6, 8, 64, 256), Format(3, 8, 5, 64), Format(3, 3, 17, 96), Format(8, 8, 256, 256))
FORMS += (Format(6, 7, 0, 256), Format(4, 6, 100, 288), Format(5, 7, 1024, 1024))


def normal(count, dtype=torch.float32, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(x, seed=SEED, stochastic=True, form=USUAL):
    """Return x encoded and decoded in its own type, as float64."""
    packed = smaq.encode(x, seed, stochastic=stochastic, form=form)
    return smaq.decode(packed, x.numel(), x.dtype, form=form).double()


def header_of(packed, block, form=USUAL):
    """Return mean, main end, tail start and tail end of a block."""
    return packed[block * form.block_bytes :][:8].clone().view(torch.bfloat16).double()


def largest_error(x, packed, form=USUAL):
    """Return the largest step of each element: of its block's main values and of its outliers."""
    headers = torch.stack([header_of(packed, block, form) for block in range(-(-len(x) // form.block))])
    main, tail = headers[:, 1] / form.main_steps, (headers[:, 3] - headers[:, 2]) / form.tail_steps
    return torch.maximum(main, tail).repeat_interleave(form.block)[: len(x)]


@pytest.mark.parametrize(
    ("form", "bits", "decibels"),
    [
        (USUAL, 6 + 1 / 4 + 64 / 256, 33.6),
        (Format(6, 8, 64, 256), 6 + 2 / 4 + 64 / 256, 34.2),
        (Format(6, 7, 32, 256), 6 + 1 / 8 + 64 / 256, 31.1),
    ],
)
def test_bits_and_errors_of_a_normal_sample_are_those_of_the_study(form, bits, decibels):
    x = normal(2**20)
    packed = smaq.encode(x, SEED, stochastic=False, form=form)
    nearest, stochastic = (x - whole(x, stochastic=noisy, form=form) for noisy in (False, True))

    assert 8 * packed.numel() == bits * x.numel()
    ratio = x.double().square().sum() / nearest.square().sum()
    assert abs(10 * ratio.log10() - decibels) < 0.15
    # Rounding up or down by chance doubles the mean square of an error that is spread over a step.
    assert abs(stochastic.square().mean() / nearest.square().mean() - 2) < 0.02


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bytes_have_a_closed_form_and_each_size_is_one_room(form):
    extra = form.outlier_bits - form.main_bits
    block_bytes = 8 + form.block * form.main_bits // 8 + -(-form.outliers * extra // 8)
    for count in (0, 1, 7, 8, 9, 31, form.block - 1, form.block, form.block + 1, 5003):
        blocks, left = divmod(count, form.block)
        eights = -(-left // 8)
        rest = 8 + eights * form.main_bits + -(-(8 * eights * form.outliers // form.block) * extra // 8)
        expected = blocks * block_bytes + (rest if left else 0)

        assert form.packed_bytes(count) == expected
        assert smaq.encode(normal(count), SEED, form=form).shape == (expected,)
        assert form.room(expected) == blocks * form.block + 8 * eights
        for wrong in range(expected + 1, form.packed_bytes(8 * -(-count // 8) + 1)):
            with pytest.raises(ValueError, match="no number of elements takes"):
                form.room(wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_operators_are_the_reference(form, dtype):
    for count in (0, 1, 7, 257, 3001):
        x = (3 * normal(count, dtype) + 1).relu()
        for stochastic in (True, False):
            packed = smaq.encode(x, SEED, stochastic=stochastic, form=form)
            assert torch.equal(packed, smaqblocks.encode(x, 7, stochastic, *form))
        for other in DTYPES:
            expected = smaqblocks.decode(packed, 0, count, other, *form)
            assert torch.equal(smaq.decode(packed, count, other, form=form), expected)


def test_a_block_by_hand():
    x = torch.zeros(64)
    x[:4] = torch.tensor([1.0, -1.0, 8.0, -8.0])
    x[10], x[20] = 0.5, -0.5
    form = Format(4, 5, 2, 64)
    packed = smaq.encode(x, SEED, stochastic=False, form=form)
    codes = [3] * 64  # no step from the mean: 0 is in the middle of -3 .. 3
    codes[:4] = [6, 0, 8 | 0, 8 | 0]  # nearly 3 steps of a little more than 1/3 up and down, and two tags
    codes[10], codes[20] = 4, 2  # nearly 1.5 steps up and down
    halves = [0x0000, 0x3F81, 0x4100, 0x4101]  # 0, after 1, 8, after 8 as bfloat16

    expected = [byte for half in halves for byte in (half & 255, half >> 8)]
    expected += [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    expected += [0b10]  # the second outlier's sign; the first code is 0 and positive
    assert packed.tolist() == expected
    assert smaq.decode(packed, 4, torch.float32, form=form).tolist() == [1 + 2**-7, -1 - 2**-7, 8, -8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_at_most_a_step_and_nothing_is_clipped(dtype):
    x = (normal(5003, dtype=torch.float64) ** 3 + 2).to(dtype)
    for form in FORMS:
        for stochastic, most in ((True, 1), (False, 0.5)):
            packed = smaq.encode(x, SEED, stochastic=stochastic, form=form)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            out = smaq.decode(packed, x.numel(), wide, form=form).double()
            # Three roundings in float32 of numbers below 128, and noise in steps of 2**-16.
            bound = most * largest_error(x, packed, form) * (1 + 2**-14) + 2**-16
            assert ((out - x.double()).abs() <= bound).all(), form


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(normal(4096), id="normal"),
        pytest.param(normal(4096).relu(), id="half of it zero"),
        pytest.param(normal(4096) ** 3, id="heavy tails"),
        pytest.param(100 + normal(4096), id="far from zero"),
        pytest.param(normal(4096, torch.bfloat16), id="bfloat16"),
    ],
)
def test_the_mean_over_seeds_is_the_element(x):
    seeds = 200
    total, squares = torch.zeros(4096, dtype=torch.float64), torch.zeros(4096, dtype=torch.float64)
    for seed in range(seeds):
        packed = smaq.encode(x, torch.tensor(seed))
        error = smaq.decode(packed, 4096, torch.float32).double() - x.double()
        total, squares = total + error, squares + error.square()
    steps, mean = largest_error(x, packed), total / seeds

    assert abs(total.sum() / squares.sum().sqrt()) < 4.5
    seen = squares / seeds > 1e-3 * steps.square()
    scores = mean[seen] / (squares[seen] / seeds**2).sqrt()
    assert abs(scores.square().mean() - 1) < 6 * (2 / scores.numel()) ** 0.5
    nearest = whole(x.float(), stochastic=False) - x.double()
    assert (nearest.abs() > 5 * (squares / seeds**2).sqrt()).double().mean() > 0.3  # whose bias would be seen


@pytest.mark.parametrize("form", [USUAL, Format(6, 7, 0, 256), Format(6, 7, 256, 256)], ids=str)
def test_exactly_so_many_are_outliers_and_among_equals_the_first(form):
    cases = [normal(256), torch.full((256,), 3.0), torch.tensor([1.0, -1.0]).repeat(128), normal(256).relu()]
    for x in (*cases, normal(200), torch.ones(3)):
        packed = smaq.encode(x, SEED, form=form)
        codes = bitpack.unpack(packed[8 : form.rest_start(len(x))], 6, len(x))
        keys = (x - header_of(packed, 0)[0].float()).abs().view(torch.int32) >> 16
        order = keys.sort(descending=True, stable=True).indices

        expected = len(x) * form.outliers // 256
        assert (codes >= 32).nonzero().flatten().tolist() == order[:expected].sort().values.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_with_a_value_that_is_not_finite_is_nan_and_no_other(dtype):
    for special in (torch.nan, torch.inf, -torch.inf):
        x = normal(1000, dtype)
        x[300] = special
        out = whole(x)
        assert out[256:512].isnan().all()
        assert out[:256].isfinite().all()
        assert out[512:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_come_back_finite_or_as_nan_and_the_least_near(dtype):
    largest = min(torch.finfo(dtype).max, 0.49 * smaqblocks.HUGE)
    x = normal(512, dtype)
    x[:4], x[300:] = torch.tensor([largest, -largest, largest, 0]), 0
    out = whole(x)
    assert out.isfinite().all()
    assert (out[:3].abs() > 0.97 * largest).all()
    if dtype in (torch.float32, torch.bfloat16):
        x[0] = 1.5 * smaqblocks.HUGE  # far from the others
        assert whole(x)[:256].isnan().all()
        assert whole(torch.full((256,), smaqblocks.LARGEST, dtype=dtype)).isnan().all()  # a sum overflows
        tiny = whole(normal(256, dtype) * 2.0**-120)
        assert (tiny.abs() <= smaqblocks.LEAST / 15).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 3.14159, 1e-3, 65504.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_blocks_are_what_their_mean_is_as_bfloat16_and_nearly_all_that_it_lacks(value, dtype):
    x = torch.full((300,), value).to(dtype)
    lacking = (x.double() - x.to(torch.bfloat16).double()).abs()
    # The ends are bfloat16 too, of 8 bits, and the sum is rounded to float32.
    assert ((whole(x, stochastic=False) - x.double()).abs() <= lacking * (2**-7 + 2**-14)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [USUAL, Format(4, 6, 100, 288)], ids=str)
def test_any_part_is_the_part_of_the_whole(dtype, form):
    packed = smaq.encode(normal(3001), SEED, form=form)
    everything = smaq.decode(packed, 3001, dtype, form=form)
    for start, count in ((0, 0), (3001, 0), (1, 1), (255, 2), (256, 256), (101, 2000), (3000, 1)):
        expected = everything[start : start + count]
        assert torch.equal(smaq.decode(packed, count, dtype, start, form=form), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_function_may_encode_and_decode(dynamic):
    def halves(x, seed):
        return smaq.decode(smaq.encode(x, seed), x.numel(), x.dtype)

    x = normal(1000)
    compiled = torch.compile(halves, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert torch.equal(compiled(x, SEED), halves(x, SEED))


def test_formats_are_of_shares():
    assert format_of(6, 7, 1 / 4, 256) == USUAL
    assert USUAL.block_bytes == 8 + 6 * 32 + 8
