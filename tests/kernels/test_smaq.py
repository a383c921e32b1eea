"""kernels/smaq.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actbench.methods.formats.ops import smaq
from actbench.methods.formats.ops.smaq import reference as smaqblocks
from actbench.methods.formats.ops.smaq.format import SMAQ, Format

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 7, 8, 31, 255, 256, 257, 5003)
USUAL = Format(6, 7, 64, 256)
FORMS = (
    USUAL,
    Format(6, 8, 64, 256),
    Format(3, 8, 5, 64),
    Format(3, 3, 17, 96),
    Format(8, 8, 256, 256),
    Format(6, 7, 0, 256),
    Format(4, 6, 100, 288),
    Format(5, 7, 1024, 1024),
)
CASES = (*((count, USUAL) for count in SIZES[:-1]), *((SIZES[-1], form) for form in FORMS))
SEED = -0x1234_5678_9ABC_DEF
GUARD = 0xA5


def placed(tensor: torch.Tensor, device: torch.device, start: int) -> torch.Tensor:
    """Return a copy on a device, `start` elements behind an aligned address."""
    place = torch.empty(tensor.numel() + start, dtype=tensor.dtype, device=device)
    return place[start:].view(tensor.shape).copy_(tensor)


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a normal sample whose parts are ordinary, tiny, huge, constant, zeros of both signs, and not finite."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    x[600:1100] = x[600:1100].relu()
    x[1100:1700] *= torch.finfo(dtype).smallest_normal / 2
    x[1700:2300] *= torch.finfo(dtype).max / 64
    x[2300:2900] = 3.14159
    x[2900:3200] = torch.tensor([0.0, -0.0]).repeat(150)[: x[2900:3200].numel()]
    x[3200:3500] = torch.tensor([1.0, -1.0, 1.0]).repeat(100)[: x[3200:3500].numel()]
    for place, special in ((4000, torch.nan), (4300, torch.inf), (4700, -torch.inf)):
        x[place : place + 1] = special
    return x.to(dtype)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a float tensor; all NaN are one."""
    plain = torch.where(tensor.isnan(), torch.nan, tensor).cpu()
    return plain.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


@pytest.mark.parametrize(("dtype", "start"), [(DTYPES[0], 0), (DTYPES[0], 1), *((dtype, 1) for dtype in DTYPES[1:])])
def test_encode_is_the_reference(dtype: torch.dtype, start: int, device: torch.device) -> None:
    for count, form in CASES:
        x, stochastic = values(count, dtype), count != 257
        expected = smaqblocks.encode(x, SEED, stochastic, *form)
        packed = placed(torch.full_like(expected, GUARD), device, start)
        smaq.launch_encode(packed, placed(x, device, start), torch.tensor(SEED, device=device), stochastic, *form)
        assert torch.equal(packed.cpu(), expected), (count, form)


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("begin", [0, 1])
def test_decode_is_the_reference(dtype: torch.dtype, begin: int, device: torch.device) -> None:
    x = values(5003, dtype)
    for form in FORMS:
        packed = smaqblocks.encode(x, SEED, True, *form)
        there = placed(packed, device, begin)
        for first, count in ((0, 5003), (0, 0), (5, 1), (8, 256), (255, 258), (5002, 1)):
            out = placed(torch.zeros(count, dtype=dtype), device, begin)
            smaq.launch_decode(out, there, first, count, dtype, *form)

            expected = smaqblocks.decode(packed, first, count, dtype, *form)
            assert np.array_equal(bits_of(out), bits_of(expected)), (form, first, count)


@pytest.mark.parametrize("form", [USUAL, Format(3, 8, 5, 64), Format(5, 7, 1024, 1024)], ids=str)
@pytest.mark.parametrize("start", [0, 1])
def test_kernels_write_nothing_beyond_their_output(host_launch, form: Format, start: int) -> None:
    macros, parts = smaq.macros_of(torch.float16, form), smaq.sizes_of(form)
    for count in (1, 257, 1100):
        x = values(count, torch.float16)
        expected = smaqblocks.encode(x, SEED, True, *form)
        size = expected.numel()
        packed = torch.full((start + size + 64,), GUARD, dtype=torch.uint8)
        out = torch.full((start + count + 64,), GUARD, dtype=torch.float16)
        noisy = torch.tensor(SEED), np.uint32(1)
        encoding = np.int64(count), *parts, *noisy
        host_launch("smaq", "smaq_encode", macros, 1024, x, packed[start:], *encoding)
        decoding = np.int64(size), np.int64(form.room(size)), np.int64(0), np.int64(count), *parts
        host_launch("smaq", "smaq_decode", macros, 1024, packed[start:], out[start:], *decoding)

        assert torch.equal(packed[start : start + size], expected)
        for buffer, last in ((packed, start + size), (out, start + count)):
            assert (buffer[:start] == GUARD).all()
            assert (buffer[last:] == GUARD).all()


@pytest.mark.gpu
def test_operators_reach_the_kernels_beyond_two_to_the_31_elements() -> None:
    count, device, seed = 2**31 + 2**20 + 5, torch.device("cuda"), torch.tensor(SEED, device="cuda")
    x = torch.randn(2**20, device=device).half().repeat(count // 2**20 + 1)[:count]

    packed = smaq.encode(x, seed)

    assert packed.numel() == SMAQ.packed_bytes(count)
    for start in (0, 2**31 - 2**12, 2**31 + 2**19):
        part, block = x[start : start + 2**13].cpu(), start // 256
        expected = smaqblocks._encoded(part.view(-1, 256), start, USUAL, SEED, True).flatten()
        there = packed[block * USUAL.block_bytes :][: expected.numel()].cpu()
        assert torch.equal(there, expected)
        decoded = smaq.decode(packed, part.numel(), torch.float16, start).cpu()
        assert torch.equal(decoded, smaqblocks.decode(expected, 0, part.numel(), torch.float16, *USUAL))
