"""ReLU with its mask on the CPU, in one pass over the bits of the values: no type needs to be widened for a sign."""

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor, bfloat16, empty, empty_like, float16, float32, uint8

from actbench.ops.cpu import CPU, lanes
from actbench.ops.cpu.compiled import BLOCK, at, inlined, kernel
from actbench.ops.cpu.hugepages import LEAST_BYTES, advise
from actbench.ops.cpu.lanes import AT_ONCE, MANY

_NEGATIVE_INFINITY = {float16: 0xFC00, bfloat16: 0xFF80}


def relu(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ReLU of x and one bit for each element: whether it is above zero or NaN.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        out: A tensor like x to write to, which may be x.

    Returns:
        ``out``, with the negative zeros and NaN of x, and uint8 of ``ceil(x.numel() / 8)`` bytes.
    """
    if out is None:
        out = empty_like(x)
        if out.nbytes >= LEAST_BYTES:
            advise(out)
    count = x.numel()
    mask = empty((count + 7) // 8, dtype=uint8, device=CPU)
    if x.dtype == float32:
        _relu32(count, count, x.data_ptr(), out.data_ptr(), mask.data_ptr())
    else:
        _relu16(count, count, x.data_ptr(), _NEGATIVE_INFINITY[x.dtype], out.data_ptr(), mask.data_ptr())
    return out, mask


def select(mask: Tensor, grad: Tensor) -> Tensor:
    """Return each gradient whose bit is 1, and zero in place of the others.

    Args:
        mask: uint8, as :func:`relu` gives it.
        grad: float32, float16 or bfloat16, contiguous.

    Returns:
        A tensor like ``grad``.
    """
    out = empty_like(grad)
    if out.nbytes >= LEAST_BYTES:
        advise(out)
    count, choose = grad.numel(), _select32 if grad.dtype == float32 else _select16
    choose(count, count, mask.data_ptr(), grad.data_ptr(), out.data_ptr())
    return out


@inlined
def _relu_block(x: np.ndarray, infinity: int, out: np.ndarray, mask: np.ndarray) -> None:
    done = x.size // MANY * MANY
    for i in range(0, done, MANY):
        lanes.positive(i, x, infinity, out, mask)
    if done < x.size:
        rest, kept, bits = np.zeros(MANY, x.dtype), np.empty(MANY, x.dtype), np.empty(MANY // 8, np.uint8)
        rest[: x.size - done] = x[done:]
        lanes.positive(0, rest, infinity, kept, bits)
        out[done:] = kept[: x.size - done]
        mask[done // 8 :] = bits[: mask.size - done // 8]


@inlined
def _select_block(mask: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
    done = grad.size // AT_ONCE * AT_ONCE
    for i in range(0, done, AT_ONCE):
        lanes.keep(i, mask, grad, out)
    for i in range(done, grad.size):
        kept = mask[i >> 3] & np.uint8(1 << (i & 7))
        out[i] = grad[i] if kept != 0 else grad.dtype.type(0)


@kernel
def _relu32(blocks: int, count: int, x: int, out: int, mask: int) -> None:
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        bits = at(mask, (count + 7) // 8, np.uint8)[first // 8 : (end + 7) // 8]
        _relu_block(at(x, count, np.uint32)[first:end], 0xFF80_0000, at(out, count, np.uint32)[first:end], bits)


@kernel
def _relu16(blocks: int, count: int, x: int, infinity: int, out: int, mask: int) -> None:
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        bits = at(mask, (count + 7) // 8, np.uint8)[first // 8 : (end + 7) // 8]
        _relu_block(at(x, count, np.uint16)[first:end], infinity, at(out, count, np.uint16)[first:end], bits)


@kernel
def _select32(blocks: int, count: int, mask: int, grad: int, out: int) -> None:
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        bits = at(mask, (count + 7) // 8, np.uint8)[first // 8 : (end + 7) // 8]
        _select_block(bits, at(grad, count, np.uint32)[first:end], at(out, count, np.uint32)[first:end])


@kernel
def _select16(blocks: int, count: int, mask: int, grad: int, out: int) -> None:
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        bits = at(mask, (count + 7) // 8, np.uint8)[first // 8 : (end + 7) // 8]
        _select_block(bits, at(grad, count, np.uint16)[first:end], at(out, count, np.uint16)[first:end])
