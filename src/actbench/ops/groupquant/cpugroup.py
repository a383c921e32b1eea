"""One group at a time, in loops that vectorise: its elements, bounds, noise, codes, and what codes stand for.

What is computed is in :mod:`actbench.ops.groupquant.reference`. Every intermediate is cast back to 32 bits, because
Numba widens integer results to 64; a product and a sum stay two operations, because LLVM fuses only what it is told to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actbench.ops.cpu.compiled import at, inlined
from actbench.ops.cpu.halves import FLOAT16, FLOAT32, fill_random, widen
from actbench.ops.groupquant.reference import NAN_WORD


@inlined
def place_of(row: int, bits: int, widths: int, sums: int, columns: int, size: int) -> tuple[int, int, int]:
    """Return the width of a row's codes, where they start and end; a negative start if they are not in the buffer."""
    if bits != 0:
        return bits, 0, size
    if widths == 0:
        return 1, -1, -1
    eights = (columns + 7) // 8
    width, end = int(at(widths, row + 1, np.int32)[row]), int(at(sums, row + 1, np.int64)[row]) * eights
    start = end - width * eights
    if width < 1 or width > 8 or start < 0 or end > size:
        return 1, -1, -1
    return width, start, end


@inlined
def values_of(x: int, kind: int, first: int, end: int, wide: np.ndarray) -> Any:
    """Return elements as float32, in place or widened to ``wide``."""
    if kind == FLOAT32:
        return at(x + 4 * first, end - first, np.float32)
    widen(at(x + 2 * first, end - first, np.uint16), kind, wide[: end - first])
    return wide[: end - first].view(np.float32)


@inlined
def word_of(values: np.ndarray, kind: int) -> np.uint32:
    """Return the word of a group.

    With the low bits of the negative ones flipped, floats are in order as integers, NaN beyond infinity on both sides.

    Args:
        values: Bits of float32 numbers, int32.
        kind: What they were widened from, one of ``halves.KINDS``.
    """
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(values.size):
        flipped = np.int32(np.int32(values[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        key = np.int32(values[i] ^ flipped)
        low, high = min(low, key), max(high, key)
    if low <= np.int32(-0x7F800001) or high >= np.int32(0x7F800000):
        return np.uint32(NAN_WORD)
    largest = 0x477F if kind == FLOAT16 else 0x7F7F
    return np.uint32(_bound(low, 0xFFFF, 0, largest) | (_bound(high, 0, 0xFFFF, largest) << 16))


@inlined
def _bound(key: int, if_negative: int, if_positive: int, largest: int) -> int:
    """Return a bound as bfloat16, its magnitude cut off, or rounded up for the sign that comes with 0xFFFF."""
    if key >= 0:
        return min((key + if_positive) >> 16, largest)
    magnitude = ((~key & 0x7FFFFFFF) + if_negative) >> 16
    return 0 if magnitude == 0 else 0x8000 | min(magnitude, largest)


@inlined
def _scaled(word: np.uint32) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """Return a group's scale and 1 / scale, and its offset and range after scaling."""
    low = np.uint32(word << np.uint32(16)).view(np.float32)
    high = np.uint32(word & np.uint32(0xFFFF0000)).view(np.float32)
    largest = max(abs(low), abs(high))
    scale, inverse = np.float32(1), np.float32(1)
    if largest >= np.float32(2.0**60):
        scale, inverse = np.float32(2.0**-64), np.float32(2.0**64)
    elif largest < np.float32(2.0**-60):
        scale, inverse = np.float32(2.0**64), np.float32(2.0**-64)
    offset = np.float32(low * scale)
    return scale, inverse, offset, np.float32(np.float32(high * scale) - offset)


@inlined
def noise_of(state: np.uint64, stochastic: bool, first: int, count: int, words: np.ndarray) -> Any:
    """Return the noise of ``count`` elements from index ``first`` on, uint16."""
    if stochastic:
        fill_random(state, first // 4, words[: (first % 4 + count + 3) // 4])
    return words.view(np.uint16)[first % 4 :]


@inlined
def quantize(values: np.ndarray, word: np.uint32, bits: int, lanes: np.ndarray, codes: np.ndarray) -> None:
    """Write the codes of a group.

    Args:
        values: float32.
        word: The group's.
        bits: 1 to 8.
        lanes: The noise: uint16, at least as many as values.
        codes: uint8, at least as many as values.
    """
    scale, _, offset, span = _scaled(word)
    top = np.float32(65536 * ((1 << bits) - 1))
    slope = np.float32(top / span) if span > np.float32(0) else np.float32(0)
    for i in range(values.size):
        place = np.float32(np.float32(np.float32(values[i] * scale) - offset) * slope)
        place = place if place > np.float32(0) else np.float32(0)  # NaN too
        place = place if place < top else top
        whole = np.int32(np.rint(place))
        codes[i] = np.uint8(np.int32(np.int32(whole + np.int32(lanes[i])) >> np.int32(16)))


@inlined
def restore(codes: np.ndarray, word: np.uint32, bits: int, out: np.ndarray) -> None:
    """Write what the codes of a group stand for.

    Args:
        codes: uint8, at least as many as ``out``.
        word: The group's.
        bits: 1 to 8.
        out: float32.
    """
    _, inverse, offset, span = _scaled(word)
    step = np.float32(span / np.float32((1 << bits) - 1))
    for i in range(out.size):
        scaled = np.float32(np.float32(np.float32(codes[i]) * step) + offset)
        out[i] = np.float32(scaled * inverse)
