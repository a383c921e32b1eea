"""One SmaQ block at a time, in loops that vectorise; :mod:`actbench.methods.formats.ops.smaq.reference` says what is
computed.

As in :mod:`actbench.methods.actnn.ops.groupquant.cpu`, every intermediate is cast back to 32 bits. Distances from the
mean are compared by keys, the bits of their floats, which have the same order.
"""

from __future__ import annotations

import numpy as np

from actbench.methods.formats.ops.smaq.reference import HALF_MOST
from actbench.ops.cpu import inlined

HUGE = np.int32(253 << 23)
"""Bits of ``reference.HUGE``, 2**126."""

_LEAST = 37 << 7  # reference.LEAST, 2**-90, as bfloat16
_NEAR = np.int32(2 << 23)  # a quarter of the largest: where the search for the outliers begins
_MANY = 12  # after so many steps of the search equal keys are likely
_MAGNITUDE = np.int32(0x7FFFFFFF)
_HALF_MOST = np.float32(HALF_MOST)


@inlined
def largest_of(bits: np.ndarray) -> np.int32:
    """Return the bits of the largest magnitude of float32 numbers, given as int32."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & _MAGNITUDE))
    return largest


@inlined
def mean_of(values: np.ndarray, largest: np.int32) -> int:
    """Return the mean of float32 numbers as bits of a bfloat16; ``largest`` is the bits of their largest magnitude."""
    exponent = max(int(largest) >> 23, 33)
    scale = np.uint32((273 - exponent) << 23).view(np.float32)
    inverse = np.uint32((exponent - 19) << 23).view(np.float32)
    total = np.int32(0)
    for i in range(values.size):
        total = np.int32(total + np.int32(np.rint(np.float32(values[i] * scale))))
    mean = np.float32(np.float32(np.float32(total) / np.float32(values.size)) * inverse)
    word = int(mean.view(np.uint32))
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


@inlined
def float_of(half: int) -> np.float32:
    """Return the number that these bits are as a bfloat16."""
    return np.uint32(half << 16).view(np.float32)


@inlined
def keys_of(values: np.ndarray, mean: np.float32, d: np.ndarray, keys: np.ndarray) -> np.int32:
    """Write the differences from the mean and their keys; return the largest key."""
    bits, most = d.view(np.int32), np.int32(0)
    for i in range(values.size):
        d[i] = np.float32(values[i] - mean)
    for i in range(values.size):
        keys[i] = np.int32(bits[i] & _MAGNITUDE)
        most = max(most, keys[i])
    return most


@inlined
def _count(keys: np.ndarray, cut: np.int32) -> int:
    """Return how many keys are not below ``cut``."""
    count = np.int32(0)
    for i in range(keys.size):
        count = np.int32(count + np.int32(keys[i] >= cut))
    return int(count)


@inlined
def _beside(keys: np.ndarray, cut: np.int32) -> tuple[np.int32, np.int32]:
    """Return the largest key below ``cut``, or 0, and the smallest other key, or the largest number."""
    below, least = np.int32(0), _MAGNITUDE
    for i in range(keys.size):
        below = max(below, keys[i] if keys[i] < cut else np.int32(0))
        least = min(least, keys[i] if keys[i] >= cut else _MAGNITUDE)
    return below, least


@inlined
def _cut_of(keys: np.ndarray, most: np.int32, outliers: int) -> tuple[np.int32, int]:
    """Return a cut that at least ``outliers`` keys reach, and how many more reach it; ``most`` is the largest key.

    If more reach it, those and one more are equal to the cut.
    """
    low, high, found = np.int32(0), np.int32(most + np.int32(1)), keys.size
    middle, steps = max(np.int32(most - _NEAR), np.int32(most >> np.int32(1))), 0
    while found != outliers and np.int32(high - low) > np.int32(1):
        middle = min(max(middle, np.int32(low + np.int32(1))), np.int32(high - np.int32(1)))
        count, steps = _count(keys, middle), steps + 1
        if count >= outliers:
            low, found = middle, count
        else:
            high = middle
        if steps == _MANY:
            _, low = _beside(keys, low)
            below, _ = _beside(keys, high)
            high = np.int32(below + np.int32(1))
        middle = np.int32(low + np.int32(np.int32(high - low) >> np.int32(1)))
    return low, found - outliers


@inlined
def part(keys: np.ndarray, most: np.int32, outliers: int, header: np.ndarray) -> np.int32:
    """Find the outliers, write main end, tail start and tail end to ``header``, and return the cut between keys.

    The keys of outliers are not below the cut; all others are: equal keys of others are decreased. ``most`` is the
    largest key.
    """
    if outliers == 0:
        header[0], header[1], header[2] = max(_above(most), _LEAST), 0, _LEAST
        return np.int32(most + np.int32(1))
    cut: np.int32
    cut, spare = _cut_of(keys, most, outliers)
    main, start = _beside(keys, cut)
    if spare > 0:
        main = cut
    header[0], header[1], header[2] = max(_above(main), _LEAST), start >> 16, max(_above(most), _LEAST)
    last = keys.size - 1
    while spare > 0:
        if keys[last] == cut:
            keys[last] = np.int32(cut - np.int32(1))
            spare -= 1
        last -= 1
    return cut


@inlined
def _above(key: np.int32) -> int:
    return (int(key) + 0xFFFF) >> 16


@inlined
def quantize(
    d: np.ndarray,
    keys: np.ndarray,
    cut: np.int32,
    header: np.ndarray,
    bits: tuple[int, int],
    lanes: np.ndarray,
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
        lanes: The noise: uint16, at least as many as elements.
        codes: uint8 result: tags and low bits.
        rests: uint8 result: the high bits, written for all elements, used for outliers.
    """
    main_bits, outlier_bits = np.int32(bits[0]), np.int32(bits[1])
    half = np.int32(65536 * ((1 << (bits[0] - 2)) - 1))
    top, last = np.float32(half), np.float32(65536 * ((1 << (bits[1] - 2)) - 1))
    start = float_of(header[1])
    span = np.float32(float_of(header[2]) - start)
    main_slope = np.float32(top / float_of(header[0]))
    tail_slope = np.float32(last / span) if span > np.float32(0) else np.float32(0)
    tag, shift = np.int32(1 << (bits[0] - 1)), np.int32(main_bits - np.int32(1))
    for i in range(d.size):
        place = np.float32(d[i] * main_slope)
        place = place if place > -top else -top
        place = place if place < top else top
        main = np.int32(np.int32(np.int32(np.rint(place)) + half + np.int32(lanes[i])) >> np.int32(16))
        place = np.float32(np.float32(abs(d[i]) - start) * tail_slope)
        place = place if place > np.float32(0) else np.float32(0)
        place = place if place < last else last
        sign = np.int32(np.int32(d[i] < np.float32(0)) << np.int32(outlier_bits - np.int32(2)))
        tail = np.int32(np.int32(np.int32(np.rint(place)) + np.int32(lanes[i])) >> np.int32(16)) | sign
        codes[i] = np.uint8(np.int32(tag | (tail & (tag - np.int32(1)))) if keys[i] >= cut else main)
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
