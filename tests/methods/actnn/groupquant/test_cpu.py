import pytest
import torch

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.groupquant import reference as groups
from actbench.ops import cpu

SIZES = (0, 1, 7, 8, 31, 255, 256, 257, 2047, 2049, 7003)
HALVES = (torch.float32, torch.float16, torch.bfloat16)
SEED = torch.tensor(-5)


def values(count, dtype):
    """Return a normal sample with parts that are tiny, huge, zeros of both signs, and not finite."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    largest = torch.finfo(dtype).max
    x[1100:1700] *= torch.finfo(dtype).smallest_normal / 2
    x[1700:2300] *= largest / 8
    x[2300:2900] = torch.tensor([0.0, -0.0]).repeat(300)[: x[2300:2900].numel()]
    x[3200:3204] = torch.tensor([largest, -largest, largest, largest])[: x[3200:3204].numel()]
    for place, special in ((4000, torch.nan), (5000, torch.inf), (6000, -torch.inf)):
        x[place : place + 1] = special
    return x.to(dtype)


def same(ours, expected):
    finite = ~expected.isnan()
    return torch.equal(ours.isnan(), expected.isnan()) and torch.equal(ours[finite], expected[finite])


@pytest.mark.sampled(fast=16, slow=12)
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", HALVES)
def test_bytes_words_and_values_equal_the_reference(dtype, bits, stochastic):
    for count, group_size in (*((count, 256) for count in SIZES), (7003, 32), (7003, 96), (7003, 1024)):
        x = torch.empty(count + 1, dtype=dtype)[1:].copy_(values(count, dtype))
        expected = groups.encode(x, bits, group_size, SEED, stochastic)
        codes, meta = groupquant.encode(x, bits, group_size, SEED, stochastic)
        assert torch.equal(codes, expected[0]), (count, group_size)
        assert torch.equal(meta, expected[1]), (count, group_size)
        for start in {0, count // 3}:
            out = torch.empty(count - start, dtype=dtype)
            groupquant.decode_(out, codes, meta, bits, group_size, start)
            assert same(out, groups.decode(*expected, bits, group_size, start, count - start, dtype)), (count, start)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group_size", [32, 256, 1024])
def test_rows_of_their_own_widths_equal_the_reference(dtype, group_size):
    for rows, columns in ((0, 5), (5, 0), (1, 1), (9, 33), (16, 300), (3, 2049)):
        x = values(rows * columns, dtype).view(rows, columns)
        widths = (torch.arange(rows, dtype=torch.int32) * 3) % 8 + 1
        codes, meta = groups.encode_rows(x, widths, int(widths.sum()), group_size, SEED, True)
        ours = groupquant.encode_rows(x, widths, int(widths.sum()), group_size, SEED, True)
        assert torch.equal(ours[0], codes)
        assert torch.equal(ours[1], meta)
        assert torch.equal(groupquant.words(x, group_size), groups.words_of(x, group_size))
        for first in {0, rows // 2}:
            out, expected = torch.empty(2, rows - first, columns, dtype=dtype)
            groupquant.decode_rows(out, *ours, widths, group_size, first)
            groups.decode_rows(expected, codes, meta, widths, group_size, first)
            assert same(out, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bounds_of_every_half_value_equal_the_reference(dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for columns in (1, 2, 32):
        rows = x.view(-1, columns)
        assert torch.equal(groupquant.words(rows, 32), groups.words_of(rows, 32))


def test_bounds_of_float32_of_every_exponent_equal_the_reference():
    x = torch.arange(-(2**31), 2**31, 8191).to(torch.int32).view(torch.float32)
    assert torch.equal(groupquant.words(x[:, None], 32), groups.words_of(x[:, None], 32))


def test_neither_threads_nor_their_absence_change_a_bit(monkeypatch):
    x = torch.randn(100_003)
    codes, meta = groupquant.encode(x, 3, 256, SEED)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = groupquant.encode(x, 3, 256, SEED)
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(cpu, "_pool", lambda: None)
    for name in ("_encode", "_decode"):
        monkeypatch.setattr(groupquant.cpu, name, cpu.kernel(getattr(groupquant.cpu, name).__wrapped__))
    serial = groupquant.encode(x, 3, 256, SEED)

    for other in (alone, serial):
        assert torch.equal(other[0], codes)
        assert torch.equal(other[1], meta)
    out = groupquant.decode(*serial, 3, 256, 0, x.numel(), torch.float32)
    assert torch.equal(out, groups.decode(codes, meta, 3, 256, 0, x.numel(), torch.float32))
