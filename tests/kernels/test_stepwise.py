"""kernels/stepwise.cu, run on the host: bit for bit what the torch reference gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actbench.ops import bitpack, stepwise
from actbench.ops.cuda import stepwise as cuda

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 7, 8, 255, 256, 257, 10007)
GUARD = 0xA5

pytestmark = pytest.mark.usefixtures("on_host")


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor whose first element is at no multiple of 16 bytes."""
    place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    assert place.data_ptr() % 16 != 0 or place.numel() == 0
    return place.copy_(tensor)


def bounds_and_levels(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(bits)
    bounds = torch.randn(2**bits - 1, generator=generator).sort().values
    bounds[len(bounds) // 2] = 0
    return bounds, torch.randn(2**bits, generator=generator)


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
    plain = torch.where(tensor.isnan(), torch.nan, tensor)
    return plain.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("fold", [False, True])
def test_encode_is_the_reference(bits: int, dtype: torch.dtype, fold: bool) -> None:
    bounds, _ = bounds_and_levels(bits)
    for count in SIZES:
        x = values(count, dtype, bounds)

        expected = stepwise.encode_reference(x, bounds, bits, fold)
        assert torch.equal(cuda.encode(x, bounds, bits, fold), expected), count
        assert torch.equal(cuda.encode(misaligned(x), bounds, bits, fold), expected), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_decode_is_the_reference(bits: int, dtype: torch.dtype) -> None:
    _, levels = bounds_and_levels(bits)
    for count in SIZES:
        generator = torch.Generator().manual_seed(count)
        codes = torch.randint(2**bits, (count,), dtype=torch.uint8, generator=generator)
        grad, packed = values(count, dtype, levels), bitpack.pack(codes, bits)

        expected = bits_of(stepwise.decode_reference(packed, levels, grad, bits))
        assert np.array_equal(bits_of(cuda.decode(packed, levels, grad, bits)), expected), count
        apart = cuda.decode(misaligned(packed), levels, misaligned(grad), bits)
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


def test_every_half_value_is_widened_and_narrowed_as_torch_does() -> None:
    everything = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    levels = torch.tensor([0.37, 1.9])
    for dtype in (torch.float16, torch.bfloat16):
        grad = everything.view(dtype)
        packed = bitpack.pack((torch.arange(65536) % 2).to(torch.uint8), 1)

        expected = stepwise.decode_reference(packed, levels, grad, 1)
        assert np.array_equal(bits_of(cuda.decode(packed, levels, grad, 1)), bits_of(expected))
