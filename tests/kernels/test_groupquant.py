"""kernels/groupquant.cu and groupquantrows.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.ops.groupquant import reference as groups
from actbench.ops import noise

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 7, 8, 31, 255, 256, 257, 5003)
GROUP_SIZES = (32, 96, 128, 256, 288, 1024)
CASES = (*((count, 256) for count in SIZES[:-1]), *((SIZES[-1], group_size) for group_size in GROUP_SIZES))
ROWS = ((1, 1), (3, 7), (5, 64), (8, 300), (3, 1027), (0, 5), (5, 0))
SEED = -0x1234_5678_9ABC_DEF
GUARD = 0xA5


def placed(tensor: torch.Tensor, device: torch.device, start: int) -> torch.Tensor:
    """Return a copy on a device, `start` elements behind an aligned address."""
    place = torch.empty(tensor.numel() + start, dtype=tensor.dtype, device=device)
    return place[start:].view(tensor.shape).copy_(tensor)


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a normal sample whose parts are ordinary, ties, tiny, huge, constant, zeros of both signs, not finite."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator)
    x[512:1024] = torch.randint(0, 3 * 2**16 + 1, (512,), generator=generator)[: x[512:1024].numel()] / 2**16
    x[512:1024:32], x[513:1024:32] = 0, 3  # so 2 and 8 bits have places between two 32768ths
    largest = torch.finfo(dtype).max
    x[1100:1700] *= torch.finfo(dtype).smallest_normal / 2
    x[1700:2300] *= largest / 8
    x[2300:2900] = 3.14159
    x[2900:3200] = torch.tensor([0.0, -0.0]).repeat(150)[: x[2900:3200].numel()]
    x[3200:3204] = torch.tensor([largest, -largest, largest, largest])[: x[3200:3204].numel()]
    for place, special in ((4000, torch.nan), (4300, torch.inf), (4700, -torch.inf)):
        x[place : place + 1] = special
    return x.to(dtype)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a float tensor; all NaN are one."""
    plain = torch.where(tensor.isnan(), torch.nan, tensor).cpu()
    return plain.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def same(ours: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(ours[0].cpu(), expected[0]) and torch.equal(ours[1].cpu(), expected[1])


def widths_of(rows: int) -> torch.Tensor:
    return (torch.arange(rows, dtype=torch.int32) * 3) % 8 + 1


@pytest.mark.sampled(fast=8, slow=6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("start", [0, 1])
def test_encode_is_the_reference(bits: int, dtype: torch.dtype, start: int, device: torch.device) -> None:
    for count, group_size in CASES:
        x, stochastic = values(count, dtype), count != 257
        expected = groups.encode(x, bits, group_size, torch.tensor(SEED), stochastic)
        ours = placed(expected[0], device, start).zero_(), placed(expected[1], device, start).zero_()
        groupquant.launch_encode(
            *ours, placed(x, device, start), bits, group_size, torch.tensor(SEED, device=device), stochastic
        )
        assert same(ours, expected), (count, group_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [64, 5003, 70_000])  # the last is shared among threads
def test_an_encoder_counts_the_groups_that_are_not_finite(count: int, dtype: torch.dtype) -> None:
    x, seed = values(count, dtype), torch.tensor(SEED)

    parts, not_finite = groupquant.encoder(x, 2, 256, True)(x, seed)

    assert same(parts, groups.encode(x, 2, 256, seed, True))
    assert not_finite == torch.count_nonzero(parts[1] == groups.NAN_WORD)
    assert (not_finite > 0) == (count > 4000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("begin", [0, 1])
def test_decode_is_the_reference(bits: int, dtype: torch.dtype, begin: int, device: torch.device) -> None:
    x = values(5003, torch.float32)
    for group_size in GROUP_SIZES:
        codes, meta = groups.encode(x, bits, group_size, torch.tensor(SEED), True)
        there = placed(codes, device, begin), meta.to(device)
        for start, count in ((0, 5003), (0, 0), (5, 1), (8, 256), (255, 258), (5002, 1)):
            out = placed(torch.zeros(count, dtype=dtype), device, begin)
            groupquant.launch_decode(out, *there, bits, group_size, start)

            expected = groups.decode(codes, meta, bits, group_size, start, count, dtype)
            assert np.array_equal(bits_of(out), bits_of(expected)), (group_size, start, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_rows_of_their_own_widths_are_the_reference(group_size: int, dtype: torch.dtype, device: torch.device) -> None:
    for shape in ROWS:
        x, widths = values(shape[0] * shape[1], dtype).view(shape), widths_of(shape[0])
        total, there = int(widths.sum()), widths.to(device)
        codes, meta = groups.encode_rows(x, widths, total, group_size, torch.tensor(SEED), True)

        ours = tuple(torch.empty_like(part, device=device) for part in (codes, meta))
        groupquant.launch_encode_rows(
            *ours, placed(x, device, 1), there, total, group_size, torch.tensor(SEED, device=device), True
        )
        words = torch.empty(shape[0], -(-shape[1] // group_size), dtype=torch.int32, device=device)
        groupquant.launch_words(words, x.to(device), group_size)
        assert same(ours, (codes, meta)), shape
        assert torch.equal(words.cpu(), groups.words_of(x, group_size)), shape
        for first in {0, shape[0] // 2}:
            expected = torch.empty(shape[0] - first, shape[1], dtype=dtype)
            groups.decode_rows(expected, codes, meta, widths, group_size, first)
            out = torch.empty_like(expected, device=device)
            groupquant.launch_decode_rows(out, *ours, there, group_size, first)
            assert np.array_equal(bits_of(out), bits_of(expected)), (shape, first)


@pytest.mark.parametrize("group_size", [32, 96, 256, 1024])
@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("start", [0, 1])
def test_kernels_write_nothing_beyond_their_output(host_launch, bits: int, group_size: int, start: int) -> None:
    macros = {"SCALAR": "Float16", "BITS": bits, "LANES": groups.lanes_of(group_size)}
    for count in (1, 257, 1100):
        x = values(count, torch.float16)
        expected, words = groups.encode(x, bits, group_size, torch.tensor(SEED), True)
        size = expected.numel()
        codes = torch.full((start + size + 64,), GUARD, dtype=torch.uint8)
        meta = torch.full((words.numel() + 8,), GUARD, dtype=torch.int32)
        out = torch.full((start + count + 64,), GUARD, dtype=torch.float16)
        counts = np.int64(count), np.int64(size), np.int32(group_size)

        encoding = codes[start:], meta, *counts, torch.tensor(SEED), np.uint32(1)
        host_launch("groupquant", "groupquant_encode", macros, 1024, x, *encoding)
        host_launch(
            "groupquant", "groupquant_decode", macros, 1024, codes[start:], meta, out[start:], *counts, np.int32(0)
        )

        assert torch.equal(codes[start : start + size], expected)
        for buffer, first, last in (
            (codes, start, start + size),
            (meta, 0, words.numel()),
            (out, start, start + count),
        ):
            assert (buffer[:first] == GUARD).all()
            assert (buffer[last:] == GUARD).all()


@pytest.mark.parametrize("wrong", [[8, 8, 8, 8], [2, 9, 1, 1], [3, 0, 2, 1], [-1, 4, 2, 1], [3, 3, 2**28, 2]])
def test_rows_that_do_not_fit_touch_nothing_and_are_nan(host_launch, wrong: list[int]) -> None:
    rows, columns, group_size, total = 4, 300, 256, 8
    x, widths = values(rows * columns, torch.float32).view(rows, columns), torch.tensor(wrong, dtype=torch.int32)
    expected, words = groups.encode_rows(x, widths, total, group_size, torch.tensor(SEED), True)
    starts, fits = groups.fitting(widths, columns, expected.numel())
    codes = torch.full((expected.numel() + 64,), GUARD, dtype=torch.uint8)
    meta, out, macros = torch.zeros_like(words), torch.zeros_like(x), {"SCALAR": "Float32", "LANES": 8}
    counts = np.uint32(rows), np.int64(columns), np.int64(expected.numel()), np.int32(group_size)
    places = widths, widths.cumsum(0)

    noisy = torch.tensor(SEED), np.uint32(1)
    host_launch("groupquantrows", "groupquant_encode_rows", macros, 1024, x, codes, meta, *counts, *places, *noisy)
    host_launch("groupquantrows", "groupquant_decode_rows", macros, 1024, codes, meta, out, *counts, *places)

    written = torch.zeros_like(codes, dtype=torch.bool)
    for row in fits.nonzero().flatten().tolist():
        written[int(starts[row]) :][: 38 * wrong[row]] = True  # 38 eights in 300 elements
    assert torch.equal(meta, words)
    assert torch.equal(codes[written], expected[written[: len(expected)]])
    assert (codes[~written] == GUARD).all()
    assert torch.equal(out.isnan().all(1), ~fits)


@pytest.mark.gpu
def test_operators_reach_the_kernels_beyond_two_to_the_31_elements() -> None:
    bits, count, device = 2, 2**31 + 2**20 + 5, torch.device("cuda")
    x = torch.randn(2**20, device=device).half().repeat(count // 2**20 + 1)[:count]
    seed = torch.tensor(SEED, device="cuda")

    codes, meta = groupquant.encode(x, bits, 256, seed)

    assert codes.numel() + 4 * meta.numel() == groupquant.packed_bytes(count, bits, 256)
    for start in (0, 2**31 - 2**12, 2**31 + 2**19):
        part = x[start : start + 2**13].cpu()
        words = groups.words_of(part[None], 256)
        random = noise.numbers(SEED, start // 256, part.numel() // 256, 8, torch.device("cpu")).flatten()
        decoded = groupquant.decode(codes, meta, bits, 256, start, part.numel(), torch.float32).cpu()
        step = (groupquant.ranges(words[0]) / 3).repeat_interleave(256)
        low = groups.bounds_of(words[0])[0].repeat_interleave(256)
        expected = low + step * ((part.float() - low) / step + (random + 0.5) / 2**15).floor().clamp(0, 3)
        assert torch.equal(meta[start // 256 :][: words.shape[1]].cpu(), words[0])
        assert ((decoded - expected).abs() > step / 2).sum() < 8  # places that are rounded to the next 32768th
