"""One SmaQ block at a time, in loops that vectorise; :mod:`actbench.methods.formats.ops.smaq.reference` says what is
computed.

As in :mod:`actbench.methods.actnn.ops.groupquant.cpu`, every intermediate is cast back to 32 bits.
"""

from __future__ import annotations

import numpy as np

from actbench.methods.formats.ops.smaq.reference import HALF_MOST
from actbench.ops.cpu import inlined
from actbench.ops.cpu.halves import fused

HUGE = 254 << 7
"""The key of ``reference.HUGE``, 2**127."""

HUGE_MEAN = 253 << 7
"""The bits, as bfloat16, of the mean that is too large, 2**126."""

_LEAST = 37 << 7  # reference.LEAST, 2**-90, as bfloat16
_NEAR = 2 << 7  # a quarter of the largest: where the search for the outliers begins
_MOST_KEY = np.int16(0x7FFF)
_HALF_MOST = np.float32(HALF_MOST)


@inlined
def mean_of(values: np.ndarray, block: int, sums: np.ndarray) -> int:
    """Return the mean of float32 numbers as bits of a bfloat16; ``sums`` is float32 room for 1,024."""
    thirty_twos = 8 if block <= 256 else 32
    copy(values, sums)
    fill(sums[values.size : 32 * thirty_twos], 0)
    half = 16
    while half > 0:
        for part in range(thirty_twos):
            for i in range(half):
                low = np.float32(sums[2 * half * part + i])
                sums[half * part + i] = np.float32(low + sums[2 * half * part + half + i])
        half //= 2
    for i in range(thirty_twos):
        # a power of two is exact, and no sum over a block overflows after it
        sums[i] = np.float32(sums[i] * np.float32(1 / 1024))
    half = thirty_twos // 2
    while half > 0:
        for i in range(half):
            sums[i] = np.float32(sums[i] + sums[half + i])
        half //= 2
    mean = np.float32(sums[0] / np.float32(np.float32(values.size) * np.float32(1 / 1024)))
    word = int(mean.view(np.uint32))
    # to the nearest bfloat16, of a tie to the even one; the minimum keeps a NaN from running over into the sign
    return min((word & 0x7FFFFFFF) + 0x7FFF + (word >> 16 & 1), 0x7FFFFFFF) >> 16 | (word >> 31 << 15)


@inlined
def float_of(half: int) -> np.float32:
    """Return the number that these bits are as a bfloat16."""
    return np.uint32(half << 16).view(np.float32)


@inlined
def keys_of(values: np.ndarray, mean: np.float32, d: np.ndarray, keys: np.ndarray) -> np.int16:
    """Write the differences from the mean and their keys, int16; return the largest key."""
    bits, most = d.view(np.int32), np.int16(0)
    for i in range(values.size):
        d[i] = np.float32(values[i] - mean)
    for i in range(values.size):
        keys[i] = np.int16(np.int32(bits[i] >> np.int32(16)) & np.int32(0x7FFF))
    for i in range(values.size):
        most = max(most, keys[i])
    return most


@inlined
def _count(keys: np.ndarray, cut: int) -> int:
    """Return how many keys are not below ``cut``."""
    count, bound = np.int16(0), np.int16(cut)
    for i in range(keys.size):
        count = np.int16(count + np.int16(keys[i] >= bound))
    return int(count)


@inlined
def _beside(keys: np.ndarray, cut: int) -> tuple[np.int16, np.int16]:
    """Return the largest key below ``cut``, or -1, and the smallest other key, or the largest number."""
    below, least, bound = np.int16(-1), _MOST_KEY, np.int16(cut)
    for i in range(keys.size):
        below = max(below, keys[i] if keys[i] < bound else np.int16(-1))
        least = min(least, keys[i] if keys[i] >= bound else _MOST_KEY)
    return below, least


@inlined
def _cut_of(keys: np.ndarray, most: int, outliers: int) -> tuple[int, int]:
    """Return a cut that at least ``outliers`` keys reach, and how many more reach it; ``most`` is the largest key.

    If more reach it, those and one more are equal to the cut.
    """
    low, high, found = 0, most + 1, keys.size
    middle = max(most - _NEAR, most >> 1)
    while found != outliers and high - low > 1:
        middle = min(max(middle, low + 1), high - 1)
        count = _count(keys, middle)
        if count >= outliers:
            low, found = middle, count
        else:
            high = middle
        middle = low + ((high - low) >> 1)
    return low, found - outliers


@inlined
def part(keys: np.ndarray, most: int, outliers: int, header: np.ndarray) -> int:
    """Find the outliers, write main end, tail start and tail end to ``header``, and return the cut between keys.

    The keys of outliers are not below the cut; all others are: equal keys of others are decreased. ``most`` is the
    largest key.
    """
    if outliers == 0:
        header[0], header[1], header[2] = max(most + 1, _LEAST), 0, _LEAST
        return most + 1
    cut: int
    cut, spare = _cut_of(keys, most, outliers)
    main, start = _beside(keys, cut)
    if spare > 0:
        main = np.int16(cut)
    header[0], header[1], header[2] = max(main + 1, _LEAST), start, max(most + 1, _LEAST)
    # of equal keys the first are outliers, as by the stable sort of the reference
    last = keys.size - 1
    while spare > 0:
        if keys[last] == cut:
            keys[last] = np.int16(cut - 1)
            spare -= 1
        last -= 1
    return cut


@inlined
def quantize(
    d: np.ndarray,
    keys: np.ndarray,
    cut: int,
    header: np.ndarray,
    bits: tuple[int, int],
    noise: np.ndarray,
    codes: np.ndarray,
    rests: np.ndarray,
) -> None:
    """Write the codes of a block.

    Args:
        d: float32 differences from the mean.
        keys: As :func:`part` leaves them.
        cut: As :func:`part` gives it.
        header: uint16, as :func:`part` writes it.
        bits: Bits of main codes and of outlier codes.
        noise: The noise and 256, float32, at least as many as elements.
        codes: uint8 result: tags and low bits.
        rests: uint8 result: the high bits, written for all elements, used for outliers.
    """
    steps, tail_steps = np.int32((1 << (bits[0] - 2)) - 1), np.int32((1 << (bits[1] - 2)) - 1)
    start, bound = float_of(header[1]), np.int16(cut)
    slope = np.float32(np.float32(steps) / float_of(header[0]))
    tail_slope = np.float32(np.float32(tail_steps) / np.float32(float_of(header[2]) - start))
    tag, shift = np.int32(1 << (bits[0] - 1)), np.int32(bits[0] - 1)
    for i in range(d.size):
        # 256 keeps places positive, so that the cut to a whole number rounds down
        place = fused(d[i], slope, noise[i])
        main = np.int32(np.int32(place) + np.int32(steps - np.int32(256)))
        place = fused(np.float32(abs(d[i]) - start), tail_slope, noise[i])
        sign = np.int32(np.int32(d.view(np.uint32)[i] >> np.uint32(31)) << np.int32(bits[1] - 2))
        tail = np.int32(np.int32(place) - np.int32(256)) | sign
        codes[i] = np.uint8(np.int32(tag | (tail & (tag - np.int32(1)))) if keys[i] >= bound else main)
        rests[i] = np.uint8(tail >> shift)


@inlined
def gather(codes: np.ndarray, main_bits: int, rests: np.ndarray) -> None:
    """Move the entries of outliers to the front, in place."""
    found = 0
    for i in range(codes.size):
        rests[found] = rests[i]
        found += codes[i] >> (main_bits - 1)


@inlined
def restore(
    codes: np.ndarray, rests: np.ndarray, header: np.ndarray, bits: tuple[int, int], places: np.ndarray, out: np.ndarray
) -> None:
    """Write the values of a block's codes, float32.

    ``rests`` holds the outliers' high bits. ``places``, int16 and one longer than ``out``, receives the outliers'
    indexes.
    """
    tag = 1 << (bits[0] - 1)
    steps, tail_steps = np.int32((1 << (bits[0] - 2)) - 1), (1 << (bits[1] - 2)) - 1
    mean, start = float_of(header[0]), float_of(header[2])
    step = np.float32(float_of(header[1]) / np.float32(steps))
    tail_step = np.float32(np.float32(float_of(header[3]) - start) / np.float32(tail_steps))
    low = np.uint8(tag - 1)
    for i in range(out.size):
        whole = np.float32(np.int32(np.int32(codes[i] & low) - steps))
        out[i] = np.float32(np.float32(whole * step) + mean)
    found = 0
    for i in range(out.size):
        places[found] = i
        found += codes[i] >> (bits[0] - 1)
    for rank in range(found):
        i = places[rank]
        code = (codes[i] & (tag - 1)) | (rests[rank] << (bits[0] - 1))
        tail = np.float32(np.float32(np.float32(code & tail_steps) * tail_step) + start)
        out[i] = np.float32(np.float32(-tail if code > tail_steps else tail) + mean)


@inlined
def limit(values: np.ndarray) -> None:
    """Clamp values to the largest float16, in place."""
    for i in range(values.size):
        values[i] = _HALF_MOST if values[i] > _HALF_MOST else values[i]
        values[i] = -_HALF_MOST if values[i] < -_HALF_MOST else values[i]


# Numba turns assignments to slices in a kernel into its own loops, and drops assignments to arrays without a name.


@inlined
def fill(target: np.ndarray, value: int) -> None:
    """Write one number to all elements."""
    for i in range(target.size):
        target[i] = value


@inlined
def copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy ``source`` to ``target``."""
    for i in range(source.size):
        target[i] = source[i]
