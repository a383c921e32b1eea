import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from actbench.methods.formats import encodings
from actbench.methods.formats.encodings import Fp8, S2fp8, fp8, snr_db

SEED = torch.tensor(7)
FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(FLOAT, min_size=1, max_size=70),
    form=st.sampled_from(["e4m3", "e5m2"]),
    scale=st.sampled_from(["float32", "bfloat16"]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
)
@example([9.867103006696767e-41], "e5m2", "float32", "nearest")  # its scale is 1.2 of the least float32
def test_errors_are_at_most_a_step(values, form, scale, rounding):
    x = torch.tensor(values)
    encoding = Fp8(format=form, scale=scale, rounding=rounding, group_size=32)
    numbers, scales = encoding.encode(x, SEED)
    out = encoding.decode((numbers, scales), x.shape, x.dtype)

    assert out.isfinite().all()
    fraction, least = (3, -9) if form == "e4m3" else (2, -16)  # bits, and the exponent of the least number
    step = torch.maximum(
        x.abs().double() * 2.0**-fraction, scales.double().repeat_interleave(32)[: len(x)] * 2.0**least
    )
    share = 0.5 if rounding == "nearest" else 1
    assert ((out.double() - x.double()).abs() <= step * share * (1 + 2.0**-20) + 2.0**-149).all()
    assert (out.sign() * x.sign() >= 0).all()


def test_scales_by_hand():
    x = torch.tensor([448.0 * 3, -96.0, 0.0, 0.0, 0.0, 7.0, 1e30, 2.0])
    numbers, scales = Fp8(group_size=2).encode(x, SEED)

    assert scales.tolist() == pytest.approx([3, 2.0**-149, 7 / 448, 1e30 / 448])
    assert numbers.float().tolist() == [448, -32, 0, 0, 0, 448, 448, 0]
    assert numbers.dtype == torch.float8_e4m3fn


def test_a_scale_in_bfloat16_is_rounded_up_so_that_nothing_is_clipped():
    x = torch.rand(64 * 256, generator=torch.Generator().manual_seed(0))
    _, scales = Fp8(scale="bfloat16").encode(x, SEED)
    wanted = x.view(64, 256).amax(1) / 448

    assert scales.dtype == torch.bfloat16
    assert (scales >= wanted).all()
    assert (scales.float() <= wanted * (1 + 2**-7)).all()


def test_unscaled_numbers_are_clipped_and_infinities_are_not():
    x = torch.tensor([1e9, -1e9, torch.inf, torch.nan, 3.0])
    for name, largest, infinite in (("e4m3", 448.0, torch.nan), ("e5m2", 57344.0, torch.inf)):
        (numbers,) = Fp8(format=name, scale="none").encode(x, SEED)
        assert numbers.float()[[0, 1, 4]].tolist() == [largest, -largest, 3]
        assert numbers.float()[3].isnan()
        assert numbers.float()[2].isnan() if infinite != infinite else numbers.float()[2] == infinite


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_stochastic_rounding_has_no_bias(form):
    x = torch.randn(256, generator=torch.Generator().manual_seed(2))
    encoding = Fp8(format=form, rounding="stochastic")
    many = encoding.decode(encoding.encode(x.repeat(1000), SEED), (1000, 256), torch.float64)
    error = many.mean(0) - x

    assert abs(error.sum() / (many.var(0).sum() / 1000).sqrt()) < 4
    step = many.amax(0) - many.amin(0)
    assert (error.abs() <= 4.5 * many.std(0) / 1000**0.5 + torch.maximum(step, x.abs() / 8) * 8 / 1000).all()


class TestS2fp8:
    @settings(max_examples=150, deadline=None)
    @given(values=st.lists(st.floats(2.0**-20, 2.0**20, width=32) | st.just(0.0), min_size=1, max_size=70))
    def test_logarithms_are_close_unless_they_underflow(self, values):
        x = torch.tensor(values)
        encoding = S2fp8()
        numbers, map_ = encoding.encode(x, SEED)
        out = encoding.decode((numbers, map_), x.shape, x.dtype)
        alpha, mu = map_.double()

        assert (out[x == 0] == 0).all()
        assert out.isfinite().all()
        squeezed = torch.exp2(alpha * (x.double().log2() - mu))
        normal = (x > 0) & (squeezed >= 2.0**-14)
        error = (out.double()[normal] / x.double()[normal]).log2().abs()
        # An eighth of Y at most, and float32 logarithms and powers of numbers up to 2**20.
        assert (error <= 0.1926451 / alpha + 2.0**-18).all()
        assert (squeezed[(x > 0) & (out == 0)] <= 2.0**-16.9).all()

    def test_zeros_do_not_change_the_map(self):
        x = 1e-3 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
        sparse = torch.cat([x, torch.zeros(40000)])
        encoding = S2fp8()

        (dense_numbers, dense_map), (numbers, map_) = encoding.encode(x, SEED), encoding.encode(sparse, SEED)
        assert torch.equal(dense_map, map_)
        assert torch.equal(dense_numbers.float(), numbers.float()[:4096])
        assert snr_db(sparse, encoding.decode((numbers, map_), sparse.shape, sparse.dtype)) > 36

    def test_the_map_by_hand(self):
        x = torch.tensor([1.0, -2.0, 4.0, 0.0, torch.inf, torch.nan, -torch.inf])
        numbers, map_ = S2fp8().encode(x, SEED)

        assert map_.tolist() == [15.0, 1.0]  # 15 / (2 - 1), and the mean of 0, 1, 2
        assert numbers.float()[:5].tolist() == [2.0**-15, -1.0, 2.0**15, 0.0, torch.inf]
        assert numbers.float()[5].isnan()
        assert numbers.float()[6] == -torch.inf

    @pytest.mark.parametrize("x", [torch.zeros(9), torch.full((9,), -1e-20), torch.full((9,), 3e38), torch.ones(0)])
    def test_constant_tensors(self, x):
        encoding = S2fp8()
        parts = encoding.encode(x, SEED)

        assert torch.allclose(encoding.decode(parts, x.shape, x.dtype), x, rtol=1e-4, atol=0)
        assert parts[1].nbytes == 8


@pytest.mark.parametrize(
    "spec", ["fp8,group_size=16", "fp8,group_size=48", "fp8,group_size=700", "fp8,group_size=9999"]
)
def test_pieces_are_coded_as_the_whole_is(spec, monkeypatch):
    encoding, x = encodings.build(spec), torch.randn(1234, generator=torch.Generator().manual_seed(0)) * 1e3
    whole = encoding.encode(x, SEED)
    back = encoding.decode(whole, x.shape, torch.float32)
    monkeypatch.setattr(fp8, "_PIECE", 100)

    assert all(map(torch.equal, encoding.encode(x, SEED), whole))
    assert torch.equal(encoding.decode(whole, x.shape, torch.float32), back)
    assert (back - x).abs().max() <= x.abs().max() / 16
