"""Few-bit derivatives on the CPU: codes of a block first, then its bits, so that both loops vectorise."""

from __future__ import annotations

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
def _count_below(values: np.ndarray, bounds: np.ndarray, codes: np.ndarray) -> None:
    """Write to ``codes`` how many bounds are below each value; none is below NaN.

    One bound, then two at a time (there are ``2**b - 1``): the values are in the cache, a pass over them vectorises
    because its bounds are scalars, and two keep it busy.
    """
    first = bounds[0]
    for i in range(values.size):
        codes[i] = np.uint8(values[i] > first)
    for pair in range(1, bounds.size, 2):
        lower, upper = bounds[pair], bounds[pair + 1]
        for i in range(values.size):
            codes[i] = np.uint8(codes[i] + np.uint8(values[i] > lower) + np.uint8(values[i] > upper))


@inlined
def _look_up(codes: np.ndarray, levels: np.ndarray, chosen: np.ndarray) -> None:
    """Write the level of each code: up to 4 bits by selection, which takes half the time of loads by index."""
    if levels.size > 16:
        for i in range(chosen.size):
            chosen[i] = levels[codes[i]]
        return
    table = np.zeros(16, np.float32)
    table[: levels.size] = levels
    _select(codes, table[:8], chosen)
    if levels.size > 8:
        upper = np.empty(chosen.size, np.float32)
        _select(codes, table[8:], upper)
        for i in range(chosen.size):
            high, low = upper[i], chosen[i]
            chosen[i] = high if np.int32(codes[i]) >= np.int32(8) else low


@inlined
def _select(codes: np.ndarray, levels: np.ndarray, chosen: np.ndarray) -> None:
    """Choose among eight levels by the low three bits, one bit after the other, in lanes as wide as the levels."""
    a, b, c, d, e, f, g, h = levels[0], levels[1], levels[2], levels[3], levels[4], levels[5], levels[6], levels[7]
    for i in range(chosen.size):
        code = np.int32(codes[i])
        first = (code & np.int32(1)) != np.int32(0)
        second = (code & np.int32(2)) != np.int32(0)
        ab, cd = b if first else a, d if first else c
        ef, gh = f if first else e, h if first else g
        lower, upper = cd if second else ab, gh if second else ef
        chosen[i] = upper if (code & np.int32(4)) != np.int32(0) else lower


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
        _count_below(values, bounds, words.view(np.uint8))
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
        chosen = np.empty(source.size, np.float32)
        _look_up(words.view(np.uint8), levels, chosen)
        if kind == FLOAT32:
            _multiply(source.view(np.float32), chosen, target.view(np.float32))
        else:
            wide = np.empty(source.size, np.uint32)
            widen(source, kind, wide)
            _multiply(wide.view(np.float32), chosen, wide.view(np.float32))
            narrow(wide, kind, target)


@inlined
def _multiply(left: np.ndarray, right: np.ndarray, product: np.ndarray) -> None:
    for i in range(product.size):
        product[i] = left[i] * right[i]
