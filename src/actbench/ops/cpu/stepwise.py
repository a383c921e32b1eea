"""Few-bit derivatives on the CPU: codes of a block first, then its bits, so that both loops vectorise."""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import prange
from torch import Tensor

from actbench.ops.cpu import hugepages
from actbench.ops.cpu.bitpack import pack, unpack
from actbench.ops.cpu.compiled import BLOCK, Kernel, inlined
from actbench.ops.cpu.halves import FLOAT32, KINDS, clear_signs, narrow, raw, widen


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
    packed = torch.empty((x.numel() * bits + 7) // 8, dtype=torch.uint8)
    _encode(x.numel(), raw(x), KINDS[x.dtype], bounds.detach().numpy(), bits, fold, packed.numpy())
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
    out = hugepages.empty_like(grad)
    kind = KINDS[grad.dtype]
    _decode(grad.numel(), packed.numpy(), levels.detach().numpy(), raw(grad), kind, bits, raw(out))
    return out


@inlined
def _codes_of(values: np.ndarray, bounds: np.ndarray, codes: np.ndarray) -> None:
    """Write to ``codes`` how many bounds are below each value; none is below NaN.

    Up to 3 bits by halving among bounds in registers; then by counting two bounds a pass. Both vectorise.
    """
    if bounds.size <= 7:
        t = np.full(7, np.inf, np.float32)
        t[: bounds.size] = bounds
        a, b, c, d, e, f, g = t[0], t[1], t[2], t[3], t[4], t[5], t[6]
        for i in range(values.size):
            codes[i] = np.uint8(_halved(values[i], a, b, c, d, e, f, g))
    else:
        _count_below(values, bounds, codes)


@numba.njit(inline="always")
def _halved(x: float, a: float, b: float, c: float, d: float, e: float, f: float, g: float) -> np.int32:
    """Return how many of seven ascending bounds are below x."""
    above_d = x > d
    above_b_or_f = x > (f if above_d else b)
    low, high = e if above_d else a, g if above_d else c
    above_last = x > (high if above_b_or_f else low)
    four, two = np.int32(4) if above_d else np.int32(0), np.int32(2) if above_b_or_f else np.int32(0)
    return np.int32(np.int32(four + two) + np.int32(above_last))


@inlined
def _count_below(values: np.ndarray, bounds: np.ndarray, codes: np.ndarray) -> None:
    first = bounds[0]
    for i in range(values.size):
        codes[i] = np.uint8(values[i] > first)
    for pair in range(1, bounds.size, 2):
        lower, upper = bounds[pair], bounds[pair + 1]
        for i in range(values.size):
            codes[i] = np.uint8(codes[i] + np.uint8(values[i] > lower) + np.uint8(values[i] > upper))


@inlined
def _scale(codes: np.ndarray, levels: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
    """Write ``grad * levels[code]``: up to 4 bits by selection, which takes half the time of loads by index."""
    if levels.size <= 8:
        t = np.zeros(8, np.float32)
        t[: levels.size] = levels
        a, b, c, d, e, f, g, h = t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]
        for i in range(out.size):
            out[i] = grad[i] * _one_of(np.int32(codes[i]), a, b, c, d, e, f, g, h)
    elif levels.size == 16:
        t = levels
        a, b, c, d, e, f, g, h = t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]
        p, q, r, s, u, v, w, x = t[8], t[9], t[10], t[11], t[12], t[13], t[14], t[15]
        for i in range(out.size):
            code = np.int32(codes[i])
            low = _one_of(code, a, b, c, d, e, f, g, h)
            high = _one_of(code, p, q, r, s, u, v, w, x)
            out[i] = grad[i] * (high if np.int32(code & np.int32(8)) != np.int32(0) else low)
    else:
        for i in range(out.size):
            out[i] = grad[i] * levels[codes[i]]


@numba.njit(inline="always")
def _one_of(code: np.int32, a: float, b: float, c: float, d: float, e: float, f: float, g: float, h: float) -> float:
    """Choose by the low three bits of a code, in lanes as wide as the levels."""
    first = np.int32(code & np.int32(1)) != np.int32(0)
    second = np.int32(code & np.int32(2)) != np.int32(0)
    ab, cd, ef, gh = b if first else a, d if first else c, f if first else e, h if first else g
    low, high = cd if second else ab, gh if second else ef
    return high if np.int32(code & np.int32(4)) != np.int32(0) else low


@Kernel
def _encode(
    blocks: int, x: np.ndarray, kind: int, bounds: np.ndarray, bits: int, fold: bool, packed: np.ndarray
) -> None:
    step = BLOCK // 8 * bits
    for block in prange(blocks):
        source = x[block * BLOCK : (block + 1) * BLOCK]
        words = np.zeros(BLOCK // 8, np.uint64)
        if kind == FLOAT32 and not fold:
            values = source.view(np.float32)
        else:
            wide = np.empty(source.size, np.uint32)
            widen(source, kind, wide)
            if fold:
                clear_signs(wide)
            values = wide.view(np.float32)
        _codes_of(values, bounds, words.view(np.uint8))
        pack(words, bits, packed[block * step : (block + 1) * step])


@Kernel
def _decode(
    blocks: int, packed: np.ndarray, levels: np.ndarray, grad: np.ndarray, kind: int, bits: int, out: np.ndarray
) -> None:
    step = BLOCK // 8 * bits
    for block in prange(blocks):
        source = grad[block * BLOCK : (block + 1) * BLOCK]
        target = out[block * BLOCK : (block + 1) * BLOCK]
        words = np.empty(BLOCK // 8, np.uint64)
        unpack(packed[block * step : (block + 1) * step], bits, words)
        codes = words.view(np.uint8)
        if kind == FLOAT32:
            _scale(codes, levels, source.view(np.float32), target.view(np.float32))
        else:
            wide = np.empty(source.size, np.uint32)
            product = np.empty(source.size, np.uint32)
            widen(source, kind, wide)
            _scale(codes, levels, wide.view(np.float32), product.view(np.float32))
            narrow(product, kind, target)
