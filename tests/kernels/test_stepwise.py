"""kernels/stepwise.cu, on the host and on CUDA: bit for bit what the torch reference gives."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from actbench.methods.fewbit.ops import stepwise
from actbench.ops import bitpack

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 7, 8, 255, 256, 257, 10007)
GUARD = 0xA5


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor whose first element is at no multiple of 16 bytes."""
    place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    assert place.data_ptr() % 16 != 0 or place.numel() == 0
    return place.copy_(tensor)


def bounds_and_levels(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(bits)
    bounds = torch.randn(2**bits - 1, generator=generator)
    bounds[0] = 0
    return bounds.sort().values, torch.randn(2**bits, generator=generator)


def values(count: int, dtype: torch.dtype, bounds: torch.Tensor) -> torch.Tensor:
    """Return a normal sample that also has every bound, and what is special, where there is room."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    tiny = torch.finfo(dtype).smallest_normal / 4
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, tiny, -tiny, torch.finfo(dtype).max])
    special = torch.cat([special, bounds])[: max(count - 1, 0)]
    x[len(x) - len(special) :] = special
    return x.to(dtype)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a float tensor; all NaN are one."""
    plain = torch.where(tensor.isnan(), torch.nan, tensor).cpu()
    return plain.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def launched(operator, launch, *arguments):
    """Return what a launch writes to the results that an operator allocates."""
    made = operator.__wrapped__(*arguments)
    launch(*(made if isinstance(made, tuple) else (made,)), *arguments)
    return made


encode = partial(launched, stepwise.encode, stepwise.launch_encode)
decode = partial(launched, stepwise.decode, stepwise.launch_decode)


@pytest.mark.sampled(fast=12, slow=10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("fold", [False, True])
def test_encode_is_the_reference(bits: int, dtype: torch.dtype, fold: bool, device: torch.device) -> None:
    bounds, _ = bounds_and_levels(bits)
    table = bounds.to(device)
    for count in SIZES:
        x = values(count, dtype, bounds)

        expected = stepwise.encode_reference(x, bounds, bits, fold)
        for place in (x.to(device), misaligned(x.to(device))):
            assert torch.equal(encode(place, table, bits, fold).cpu(), expected), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_decode_is_the_reference(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    _, levels = bounds_and_levels(bits)
    table = levels.to(device)
    for count in SIZES:
        generator = torch.Generator().manual_seed(count)
        codes = torch.randint(2**bits, (count,), dtype=torch.uint8, generator=generator)
        grad, packed = values(count, dtype, levels), bitpack.pack(codes, bits)

        expected = bits_of(stepwise.decode_reference(packed, levels, grad, bits))
        grad, packed = grad.to(device), packed.to(device)
        assert np.array_equal(bits_of(decode(packed, table, grad, bits)), expected), count
        apart = decode(misaligned(packed), table, misaligned(grad), bits)
        assert np.array_equal(bits_of(apart), expected), count


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("start", [0, 1])
def test_kernels_write_nothing_beyond_their_output(host_launch, bits: int, start: int) -> None:
    bounds, levels = bounds_and_levels(bits)
    for count in SIZES[1:]:
        x, size = values(count, torch.float16, bounds), bitpack.packed_bytes(count, bits)
        packed = torch.full((start + size + 64,), GUARD, dtype=torch.uint8)
        out = torch.full((start + count + 64,), GUARD, dtype=torch.float16)
        macros, length = {"BITS": bits, "SCALAR": "Float16"}, np.int64(count)

        encoding = (x, bounds, packed[start:], length, np.uint32(0xFFFFFFFF))
        host_launch("stepwise", "stepwise_encode", macros, count, *encoding)
        host_launch("stepwise", "stepwise_decode", macros, count, packed[start:], levels, x, out[start:], length)

        assert torch.equal(packed[start : start + size], stepwise.encode_reference(x, bounds, bits, False))
        assert (packed[:start] == GUARD).all()
        assert (packed[start + size :] == GUARD).all()
        assert (out[:start] == GUARD).all()
        assert (out[start + count :] == GUARD).all()


def test_every_half_value_is_widened_and_narrowed_as_torch_does(device: torch.device) -> None:
    everything = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    levels = torch.tensor([0.37, 1.9])
    for dtype in (torch.float16, torch.bfloat16):
        grad = everything.view(dtype)
        packed = bitpack.pack((torch.arange(65536) % 2).to(torch.uint8), 1)

        expected = stepwise.decode_reference(packed, levels, grad, 1)
        found = launched(
            stepwise.decode, stepwise.launch_decode, packed.to(device), levels.to(device), grad.to(device), 1
        )
        assert np.array_equal(bits_of(found), bits_of(expected))
        assert (found[found.isnan()].view(torch.int16) == 0x7FFF).all()  # the one NaN of common.cuh


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("fold", [False, True])
def test_every_half_value_is_above_the_bounds_below_it(bits: int, fold: bool, device: torch.device) -> None:
    """Bounds between two numbers of the type, beyond its ends, subnormal, zero and infinite."""
    ends = [
        -torch.inf,
        -3.4e38,
        -7e4,
        -65504.1,
        -1e-3,
        -6.1e-5,
        -3e-8,
        -1e-42,
        -0.0,
        1e-42,
        3e-8,
        1e-3,
        65519.9,
        3.39e38,
    ]
    everything = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    count = 2**bits - 1
    for dtype, start in product((torch.float16, torch.bfloat16), range(0, max(1, len(ends) - count + 1), 4)):
        some = torch.tensor(ends[start:][:count])
        bounds = torch.cat([some, torch.linspace(-1, 1, count - len(some))]).sort().values
        x = everything.view(dtype)

        expected = stepwise.encode_reference(x, bounds, bits, fold)
        assert torch.equal(encode(x.to(device), bounds.to(device), bits, fold).cpu(), expected)


@pytest.mark.gpu
def test_operators_reach_the_kernels_beyond_two_to_the_31_elements() -> None:
    bits, count, device = 3, 2**31 + 2**20 + 5, torch.device("cuda")
    bounds, levels = (table.to(device) for table in bounds_and_levels(bits))
    x = torch.randn(2**20, device=device).half().repeat(count // 2**20 + 1)[:count]
    x[-(2**20) :] = torch.randn(2**20, device=device).half()

    packed = torch.ops.actbench.stepwise_encode(x, bounds, bits, False)
    out = torch.ops.actbench.stepwise_decode(packed, levels, x, bits)

    assert packed.numel() == bitpack.packed_bytes(count, bits)
    for start in (0, 2**31 - 2**10, 2**31, (count - 2**19) // 8 * 8):
        part, byte = x[start : start + 2**19 + 8], start // 8 * bits
        expected = stepwise.encode_reference(part, bounds, bits, False)
        assert torch.equal(packed[byte : byte + expected.numel()], expected)
        products = stepwise.decode_reference(expected, levels, part, bits)
        assert torch.equal(out[start : start + 2**19 + 8], products)
