"""Group quantization on the CPU: the loop over one group vectorises, and threads share the groups of all rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from actbench.methods.actnn.ops.groupquant.reference import NAN_WORD, lanes_of
from actbench.ops.bitpack.cpu import pack, unpack
from actbench.ops.cpu import BLOCK, at, inlined, kernel
from actbench.ops.cpu.halves import FLOAT16, FLOAT32, KINDS, fill_noise, fused, narrow, state_at, widen


@inlined
def place_of(row: int, bits: int, widths: int, sums: int, columns: int, size: int) -> tuple[int, int, int]:
    """Return a row's bits, and the bytes where its codes start and end; a negative start if outside the buffer."""
    # 0 bits stand for rows of different widths, and no widths for words alone, without codes
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
    """Return elements as float32: a view of them, or widened into ``wide``."""
    if kind == FLOAT32:
        return at(x + 4 * first, end - first, np.float32)
    widen(at(x + 2 * first, end - first, np.uint16), kind, wide[: end - first])
    return wide[: end - first].view(np.float32)


@inlined
def word_of(values: np.ndarray, kind: int) -> np.uint32:
    """Return the word of a group of float32 numbers, given as int32 and widened from ``kind``.

    With the low bits of negative floats flipped, floats are ordered as integers, NaN beyond infinity on both sides.
    """
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(values.size):
        flipped = np.int32(np.int32(values[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        key = np.int32(values[i] ^ flipped)
        low, high = min(low, key), max(high, key)
    # these are the keys of minus infinity and infinity; those of NaN lie beyond them
    if low <= np.int32(-0x7F800001) or high >= np.int32(0x7F800000):
        return np.uint32(NAN_WORD)
    # as bfloat16: 65280, which float16 still holds, or the largest finite number
    largest = 0x477F if kind == FLOAT16 else 0x7F7F
    return np.uint32(_bound(low, 0xFFFF, 0, largest) | (_bound(high, 0, 0xFFFF, largest) << 16))


@inlined
def _bound(key: int, if_negative: int, if_positive: int, largest: int) -> int:
    """Return a bound as bfloat16: its magnitude is cut off, or rounded up for the sign whose argument is 0xFFFF."""
    if key >= 0:
        return min((key + if_positive) >> 16, largest)
    magnitude = ((~key & 0x7FFFFFFF) + if_negative) >> 16
    # no bound is -0.0, as in the reference
    return 0 if magnitude == 0 else 0x8000 | min(magnitude, largest)


@inlined
def _scaled(word: np.uint32) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """Return a group's scale, 1 / scale, and its scaled offset and range."""
    low = np.uint32(word << np.uint32(16)).view(np.float32)
    high = np.uint32(word & np.uint32(0xFFFF0000)).view(np.float32)
    largest = max(abs(low), abs(high))
    # HUGE, TINY and SHIFT of the reference
    scale, inverse = np.float32(1), np.float32(1)
    if largest >= np.float32(2.0**60):
        scale, inverse = np.float32(2.0**-64), np.float32(2.0**64)
    elif largest < np.float32(2.0**-60):
        scale, inverse = np.float32(2.0**64), np.float32(2.0**-64)
    offset = np.float32(low * scale)
    return scale, inverse, offset, np.float32(np.float32(high * scale) - offset)


@inlined
def quantize(values: np.ndarray, word: np.uint32, bits: int, random: np.ndarray, codes: np.ndarray) -> None:
    """Write the uint8 codes of a group of float32 values; ``random`` is 256 and the noise, float32.

    A place is 256 to 512, so its last bit is 2**-15, and its code stands above the lowest 15 bits.
    """
    scale, _, offset, span = _scaled(word)
    if not span > np.float32(0):  # all values are equal, or one is not finite
        codes[: values.size] = 0
        return
    slope = np.float32(np.float32((1 << bits) - 1) / span)
    for i in range(values.size):
        above = np.float32(np.float32(values[i] * scale) - offset)
        above = above if above > np.float32(0) else np.float32(0)
        above = above if above < span else span
        place = np.float32(fused(above, slope, random[i])).view(np.int32)
        codes[i] = np.uint8(np.int32(place >> np.int32(15)))


@inlined
def restore(codes: np.ndarray, word: np.uint32, bits: int, out: np.ndarray) -> None:
    """Write the values of a group's codes, float32."""
    _, inverse, offset, span = _scaled(word)
    step = np.float32(span / np.float32((1 << bits) - 1))
    for i in range(out.size):
        scaled = np.float32(np.float32(np.float32(codes[i]) * step) + offset)
        out[i] = np.float32(scaled * inverse)


_MOST = 1024  # elements of the largest group


def encode(codes: Tensor, meta: Tensor, x: Tensor, bits: int, group_size: int, seed: Tensor, stochastic: bool) -> None:
    """Encode the elements of a tensor in memory order."""
    encoder(x.numel(), x.dtype, bits, group_size, stochastic)(codes, meta, x, seed)


@functools.lru_cache(maxsize=4096)
def encoder(
    count: int, dtype: torch.dtype, bits: int, group_size: int, stochastic: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor], int]:
    """Return a function that encodes so many elements: of codes, words, the elements and a seed.

    It returns how many groups have a value that is not finite.
    What the kernel needs but for addresses is the same in each call, and to make it takes a good part of one.
    """
    per, groups, kind = per_unit(group_size), -(-count // group_size), KINDS[dtype]
    elements, place = -(-groups // per) * BLOCK, (1, count, group_size, lanes_of(group_size), per)

    def run(codes: Tensor, meta: Tensor, x: Tensor, seed: Tensor) -> int:
        target = codes.data_ptr(), codes.numel(), seed.data_ptr(), stochastic
        found: int = _encode(elements, meta.data_ptr(), *place, x.data_ptr(), kind, bits, 0, 0, *target)
        return found

    return run


def encode_rows(
    codes: Tensor,
    meta: Tensor,
    x: Tensor,
    widths: Tensor,
    total_bits: int,
    group_size: int,
    seed: Tensor,
    stochastic: bool,
) -> None:
    """Encode rows of different widths; rows that do not fit are not written, and their words are NaN."""
    sums = widths.cumsum(0, dtype=torch.int64)
    places = 0, widths.data_ptr(), sums.data_ptr(), codes.data_ptr(), codes.numel()
    _write(meta, x, group_size, *places, seed.data_ptr(), stochastic)


def words(meta: Tensor, x: Tensor, group_size: int) -> None:
    """Find the words of the groups of rows."""
    _write(meta, x, group_size, 0, 0, 0, 0, 0, 0, False)


def _write(meta: Tensor, x: Tensor, group_size: int, *target: int) -> None:
    """Write the words of rows, and their codes; ``target`` is the kernel's last arguments, from ``bits`` on."""
    rows, columns = x.shape
    units = -(-meta.numel() // per_unit(group_size))
    place = rows, columns, group_size, lanes_of(group_size), per_unit(group_size), x.data_ptr(), KINDS[x.dtype]
    _encode(units * BLOCK, meta.data_ptr(), *place, *target)


def per_unit(group_size: int) -> int:
    """Return how many groups are one unit of a thread's work, about as much work as in other kernels."""
    return max(1, BLOCK // group_size)


def decode(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, *_: object) -> None:
    """Decode elements of a vector."""
    decoder(out.numel(), out.dtype, bits, group_size, start)(out, codes, meta)


@functools.lru_cache(maxsize=4096)
def decoder(
    count: int, dtype: torch.dtype, bits: int, group_size: int, start: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return a function that decodes so many elements from ``start`` on: of the result, codes and words."""
    per, kind = per_unit(group_size), KINDS[dtype]
    pieces = -(-(start + count) // group_size) - start // group_size if count else 0
    elements, place = -(-pieces // per) * BLOCK, (1, count, start, group_size, per, pieces)

    def run(out: Tensor, codes: Tensor, meta: Tensor) -> None:
        source = codes.data_ptr(), codes.numel(), meta.data_ptr(), bits, 0, 0
        _decode(elements, *source, *place, out.data_ptr(), kind)

    return run


def decode_rows(out: Tensor, codes: Tensor, meta: Tensor, widths: Tensor, group_size: int, first_row: int) -> None:
    """Decode rows of different widths."""
    words, sums = meta[first_row * -(-out.shape[1] // group_size) :], widths.cumsum(0, dtype=torch.int64)
    places = 0, widths[first_row:].data_ptr(), sums[first_row:].data_ptr()
    _read(out, 0, group_size, codes.data_ptr(), codes.numel(), words.data_ptr(), *places)


def _read(out: Tensor, start: int, group_size: int, *source: int) -> None:
    """Write elements of rows, in each from ``start`` on; ``source`` is the kernel's first arguments."""
    rows, columns = out.shape
    pieces = -(-(start + columns) // group_size) - start // group_size if columns else 0
    units = -(-rows * pieces // per_unit(group_size))
    place = rows, columns, start, group_size, per_unit(group_size), pieces, out.data_ptr(), KINDS[out.dtype]
    _decode(units * BLOCK, *source, *place)


@kernel
def _encode(
    units: int,
    meta: int,
    rows: int,
    columns: int,
    group_size: int,
    lanes: int,
    per_unit: int,
    x: int,
    kind: int,
    bits: int,
    widths: int,
    sums: int,
    codes: int,
    size: int,
    seed: int,
    stochastic: bool,
) -> int:
    per_row = (columns + group_size - 1) // group_size
    found, stream = at(meta, rows * per_row, np.uint32), at(codes, size, np.uint8)
    state = state_at(seed) if stochastic else np.uint64(0)
    not_finite = 0
    for unit in prange(units):
        # 256 and a half: without noise a place is rounded to the nearest code
        random, wide = np.full(_MOST, np.float32(256.5), np.float32), np.empty(_MOST, np.uint32)
        eights = np.empty(_MOST // 8, np.uint64)
        for group in range(unit * per_unit, min((unit + 1) * per_unit, rows * per_row)):
            row, first = group // per_row, group % per_row * group_size
            count = min(group_size, columns - first)
            values = values_of(x, kind, row * columns + first, row * columns + first + count, wide)
            found[group] = word_of(values.view(np.int32), kind)
            width, start, end = place_of(row, bits, widths, sums, columns, size)
            if start >= 0:
                if stochastic:
                    fill_noise(state, group, lanes, random[: (count + 7) // 8 * 8])
                # codes that the group does not have are bits of the stream, and zero
                eights[(count - 1) // 8] = np.uint64(0)
                quantize(values, found[group], width, random, eights.view(np.uint8))
                byte = start + first // 8 * width
                pack(eights[: (count + 7) // 8], width, stream[byte : min(end, byte + (count + 7) // 8 * width)])
            elif widths != 0:
                found[group] = np.uint32(NAN_WORD)
            not_finite += int(found[group] == np.uint32(NAN_WORD))
    return not_finite


@kernel
def _decode(
    units: int,
    codes: int,
    size: int,
    meta: int,
    bits: int,
    widths: int,
    sums: int,
    rows: int,
    columns: int,
    start: int,
    group_size: int,
    per_unit: int,
    pieces: int,
    out: int,
    kind: int,
) -> None:
    first_group = start // group_size
    stream = at(codes, size, np.uint8)
    words = at(meta, (rows - 1) * pieces + first_group + pieces, np.uint32)
    for unit in prange(units):
        eights, wide = np.zeros(_MOST // 8, np.uint64), np.empty(_MOST, np.uint32)
        for piece in range(unit * per_unit, min((unit + 1) * per_unit, rows * pieces)):
            row, group = piece // pieces, first_group + piece % pieces
            first, last = max(start, group * group_size), min(start + columns, (group + 1) * group_size)
            count, eight = last - first, first // 8
            width, begin, end = place_of(row, bits, widths, sums, columns, size)
            if begin >= 0:
                used = (last + 7) // 8 - eight
                byte = begin + eight * width
                unpack(stream[byte : min(end, byte + used * width)], width, eights[:used])
            found, word = eights.view(np.uint8)[first - 8 * eight :], words[row * pieces + group]
            target = row * columns + first - start
            if kind == FLOAT32:
                restore(found, word, width, at(out + 4 * target, count, np.float32))
            else:
                restore(found, word, width, wide[:count].view(np.float32))
                narrow(wide[:count], kind, at(out + 2 * target, count, np.uint16))
