"""Few-bit derivatives on the CPU, a block at a time.

Up to 4 bits in vectors (:mod:`actbench.ops.cpu.lanes`); what is left over, or has more bits, by codes first and packing
after, in loops that vectorise by themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from numba.np.unsafe import ndarray as unsafe
from torch import Tensor

from actbench.ops.cpu import CPU, hugepages, lanes
from actbench.ops.cpu.bitpack import pack, unpack
from actbench.ops.cpu.compiled import BLOCK, at, inlined, kernel
from actbench.ops.cpu.halves import FLOAT32, KINDS, clear_signs, narrow, widen
from actbench.ops.cpu.lanes import DECODED, MANY


def encode(x: Tensor, bounds: Tensor, bits: int, fold: bool) -> Tensor:
    """Pack, for each element, how many bounds lie strictly below it.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        bounds: float32, ascending, ``2**bits - 1`` of them.
        bits: 1 to 8.
        fold: Compare ``|x|``.

    Returns:
        uint8 of ``ceil(x.numel() * bits / 8)`` bytes.
    """
    packed = torch.empty((x.numel() * bits + 7) // 8, dtype=torch.uint8, device=CPU)
    count = x.numel()
    _encode(count, count, x.data_ptr(), KINDS[x.dtype], bounds.data_ptr(), bits, fold, packed.data_ptr())
    return packed


def decode(packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> Tensor:
    """Multiply each gradient by the level of its code, in float32, rounded once to the gradient's type.

    Args:
        packed: uint8, as :func:`encode` gives it.
        levels: float32, ``2**bits`` of them.
        grad: float32, float16 or bfloat16, contiguous.
        bits: 1 to 8.

    Returns:
        A tensor like ``grad``.
    """
    out = torch.empty_like(grad)
    if out.nbytes >= hugepages.LEAST_BYTES:
        hugepages.advise(out)
    count, kind = grad.numel(), KINDS[grad.dtype]
    _decode(count, count, packed.data_ptr(), levels.data_ptr(), grad.data_ptr(), kind, bits, out.data_ptr())
    return out


in_registers: Any = unsafe.to_fixed_tuple


@inlined
def encode_block(values: np.ndarray, bounds: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """Write how many bounds are below each value; none is below NaN."""
    done = values.size // MANY * MANY if bits <= 4 else 0
    if bits == 1:
        one = in_registers(bounds, 1)
        for i in range(0, done, MANY):
            lanes.encode(i, values, one, packed)
    elif bits == 2:
        three = in_registers(bounds, 3)
        for i in range(0, done, MANY):
            lanes.encode(i, values, three, packed)
    elif bits == 3:
        seven = in_registers(bounds, 7)
        for i in range(0, done, MANY):
            lanes.encode(i, values, seven, packed)
    elif bits == 4:
        fifteen = in_registers(bounds, 15)
        for i in range(0, done, MANY):
            lanes.encode(i, values, fifteen, packed)
    if done < values.size:
        words = np.zeros(BLOCK // 8, np.uint64)
        _count_below(values[done:], bounds, words.view(np.uint8))
        pack(words, bits, packed[done // 8 * bits :])


@inlined
def _count_below(values: np.ndarray, bounds: np.ndarray, codes: np.ndarray) -> None:
    """Count two bounds a pass, which vectorises."""
    first = bounds[0]
    for i in range(values.size):
        codes[i] = np.uint8(values[i] > first)
    for pair in range(1, bounds.size, 2):
        lower, upper = bounds[pair], bounds[pair + 1]
        for i in range(values.size):
            codes[i] = np.uint8(codes[i] + np.uint8(values[i] > lower) + np.uint8(values[i] > upper))


@inlined
def _scale_block(packed: np.ndarray, levels: np.ndarray, bits: int, grad: np.ndarray, out: np.ndarray) -> None:
    """Write ``grad * levels[code]``."""
    done = grad.size // DECODED * DECODED if bits <= 4 else 0
    if bits == 1:
        two = in_registers(levels, 2)
        for i in range(0, done, DECODED):
            lanes.scale1(i, packed, two, grad, out)
    elif bits == 2:
        four = in_registers(levels, 4)
        for i in range(0, done, DECODED):
            lanes.scale2(i, packed, four, grad, out)
    elif bits == 3:
        eight = in_registers(levels, 8)
        for i in range(0, done, DECODED):
            lanes.scale3(i, packed, eight, grad, out)
    elif bits == 4:
        sixteen = in_registers(levels, 16)
        for i in range(0, done, DECODED):
            lanes.scale4(i, packed, sixteen, grad, out)
    _scale_rest(packed[done // 8 * bits :], levels, bits, grad[done:], out[done:])


@inlined
def _scale_rest(packed: np.ndarray, levels: np.ndarray, bits: int, grad: np.ndarray, out: np.ndarray) -> None:
    """Write ``grad * levels[code]``, code by code."""
    if grad.size > 0:
        words = np.empty(BLOCK // 8, np.uint64)
        unpack(packed, bits, words)
        codes = words.view(np.uint8)
        for i in range(grad.size):
            out[i] = grad[i] * levels[codes[i]]


@kernel
def _encode(blocks: int, count: int, x: int, kind: int, bounds: int, bits: int, fold: bool, packed: int) -> None:
    table = at(bounds, (1 << bits) - 1, np.float32)
    stream = at(packed, (count * bits + 7) // 8, np.uint8)
    step = BLOCK // 8 * bits
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        if kind == FLOAT32 and not fold:
            values = at(x, count, np.float32)[first:end]
        else:
            wide = np.empty(end - first, np.uint32)
            if kind == FLOAT32:
                widen(at(x, count, np.uint32)[first:end], kind, wide)
            else:
                widen(at(x, count, np.uint16)[first:end], kind, wide)
            if fold:
                clear_signs(wide)
            values = wide.view(np.float32)
        encode_block(values, table, bits, stream[block * step : (block + 1) * step])


@kernel
def _decode(blocks: int, count: int, packed: int, levels: int, grad: int, kind: int, bits: int, out: int) -> None:
    table = at(levels, 1 << bits, np.float32)
    stream = at(packed, (count * bits + 7) // 8, np.uint8)
    step = BLOCK // 8 * bits
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        codes = stream[block * step : (block + 1) * step]
        if kind == FLOAT32:
            source, target = at(grad, count, np.float32)[first:end], at(out, count, np.float32)[first:end]
            _scale_block(codes, table, bits, source, target)
        else:
            wide, product = np.empty(end - first, np.uint32), np.empty(end - first, np.uint32)
            widen(at(grad, count, np.uint16)[first:end], kind, wide)
            _scale_block(codes, table, bits, wide.view(np.float32), product.view(np.float32))
            narrow(product, kind, at(out, count, np.uint16)[first:end])
