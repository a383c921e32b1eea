"""Rows of their own widths."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.groupquant import reference as groups
from actbench.ops.library import DTYPES

ops = torch.ops.actbench
SEED = torch.tensor(7)


def widths(*bits):
    return torch.tensor(bits, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 8, 31, 257, 1000])
def test_a_row_is_a_vector_that_begins_at_a_whole_byte(dtype, columns):
    x, bits = torch.randn(5, columns).to(dtype), widths(1, 8, 3, 2, 5)
    codes, meta = groupquant.encode_rows(x, bits, 19, 96, SEED, stochastic=False)
    eights, begin = -(-columns // 8), 0

    assert codes.numel() == eights * 19
    for row, width in enumerate(bits.tolist()):
        stream, words = groupquant.encode(x[row], width, 96, SEED, stochastic=False)
        assert torch.equal(codes[begin : begin + stream.numel()], stream)
        assert not codes[begin + stream.numel() : begin + eights * width].any()
        assert torch.equal(meta.view(5, -1)[row], words)
        out = torch.empty(1, columns, dtype=dtype)
        groupquant.decode_rows(out, codes, meta, bits, 96, row)
        assert torch.equal(out[0], groupquant.decode(stream, words, width, 96, 0, columns, dtype))
        begin += eights * width


def test_noise_is_that_of_the_flattened_rows():
    x = torch.randn(6, 64)
    codes, meta = groupquant.encode_rows(x, widths(3, 3, 3, 3, 3, 3), 18, 64, SEED)
    flat = groupquant.encode(x.flatten(), 3, 64, SEED)
    assert torch.equal(codes, flat[0])
    assert torch.equal(meta, flat[1])


@pytest.mark.parametrize("bits", [(8, 8, 8), (2, 9, 1), (0, 4, 4), (-2, 5, 5)])
def test_rows_that_do_not_fit_are_nan_and_the_others_are_not(bits):
    x = torch.randn(3, 300)
    codes, meta = groupquant.encode_rows(x, widths(*bits), 8, 256, SEED)
    out = torch.zeros(3, 300)
    groupquant.decode_rows(out, codes, meta, widths(*bits), 256, 0)
    _, fits = groups.fitting(widths(*bits), 300, 38 * 8)

    assert codes.numel() == 38 * 8
    assert not fits.all()
    assert torch.equal(out.isnan().all(1), ~fits)
    assert torch.equal(out.isfinite().all(1), fits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (3, 257), (7, 1024)])
def test_ranges_are_known_before_encoding(dtype, shape):
    x = torch.randn(shape).to(dtype)
    before = groupquant.group_ranges(x, 256)
    _, meta = groupquant.encode_rows(x, torch.full((shape[0],), 2, dtype=torch.int32), 2 * shape[0], 256, SEED)

    assert before.dtype == torch.float32
    assert before.shape == (shape[0], -(-shape[1] // 256))
    assert torch.equal(before.flatten(), groupquant.ranges(meta))
    for row, columns in ((row, part) for row in range(shape[0]) for part in range(before.shape[1])):
        group = x[row, 256 * columns : 256 * (columns + 1)].double()
        spread = group.max() - group.min()
        assert spread <= before[row, columns] <= spread + 2**-7 * (group.max().abs() + group.min().abs())


def test_fake_tensors_have_the_shapes_of_real_ones():
    with FakeTensorMode():
        x, seed = torch.empty(4, 300, dtype=torch.float16), torch.empty((), dtype=torch.int64)
        codes, meta = groupquant.encode(x.view(-1), 3, 256, seed)
        assert (codes.shape, meta.shape) == ((450,), (5,))
        assert groupquant.decode(codes, meta, 3, 256, 300, 600, torch.bfloat16).shape == (600,)
        codes, meta = groupquant.encode_rows(x, torch.empty(4, dtype=torch.int32), 10, 256, seed)
        assert (codes.shape, meta.shape) == ((380,), (8,))
        assert groupquant.group_ranges(x, 256).shape == (4, 2)


def test_a_compiled_function_may_encode_and_decode():
    def halves(x, seed):
        codes, meta = groupquant.encode(x, 4, 256, seed)
        return groupquant.decode(codes, meta, 4, 256, 0, x.numel(), x.dtype)

    x = torch.randn(1000)
    assert torch.equal(torch.compile(halves, fullgraph=True, backend="aot_eager")(x, SEED), halves(x, SEED))
