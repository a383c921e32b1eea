"""Packing of b-bit codes on the CPU, eight at a time, as one little-endian stream of bits.

Eight codes are one 64-bit word with a code in each byte. Three steps of shift, mask and or join neighbours (codes, then
pairs, then fours); then the low b bytes of the word are the stream. Unpacking runs the same steps backwards. The word
is read through a view, so the machine must be little-endian.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import prange
from torch import Tensor

from actbench.ops.cpu import BLOCK, at, inlined, kernel


def pack_codes(packed: Tensor, codes: Tensor, bits: int) -> None:
    """Pack codes on the CPU."""
    _pack(codes.numel(), codes.numel(), codes.data_ptr(), bits, packed.data_ptr())


def unpack_codes(codes: Tensor, packed: Tensor, bits: int, count: int) -> None:
    """Unpack codes on the CPU."""
    _unpack(count, count, packed.data_ptr(), bits, codes.data_ptr())


@inlined
def pack(words: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """Write codes as a stream that fills ``packed``; if its size is not a multiple of ``bits``, the last word is cut.

    ``words`` are uint64 with eight codes below ``2**bits`` in each, as many as fit ``packed``; they are compacted in
    place.
    """
    codes, pairs, fours = _lanes(16, bits), _lanes(32, 2 * bits), _lanes(64, 4 * bits)
    for i in range(words.size):
        word = _closed(words[i], codes, bits, 8)
        word = _closed(word, pairs, 2 * bits, 16)
        words[i] = _closed(word, fours, 4 * bits, 32)
    whole = packed.size // bits
    _store(words[:whole], bits, packed)
    for byte in range(packed.size - whole * bits):
        packed[whole * bits + byte] = np.uint8(words[whole] >> np.uint64(8 * byte))


@inlined
def unpack(packed: np.ndarray, bits: int, words: np.ndarray) -> None:
    """Read the codes of a stream to ``words``, uint64 with eight codes in each; words past its end stay as they are."""
    codes, pairs, fours = _lanes(16, bits), _lanes(32, 2 * bits), _lanes(64, 4 * bits)
    whole = packed.size // bits
    _load(packed, bits, words[:whole])
    if whole * bits < packed.size:
        word = np.uint64(0)
        for byte in range(packed.size - whole * bits):
            word |= np.uint64(packed[whole * bits + byte]) << np.uint64(8 * byte)
        words[whole] = word
    for i in range(words.size):
        word = _opened(words[i], fours, 4 * bits, 32)
        word = _opened(word, pairs, 2 * bits, 16)
        words[i] = _opened(word, codes, bits, 8)


@inlined
def _closed(word: np.uint64, low: np.uint64, used: int, place: int) -> np.uint64:
    """Bring the field at ``place`` of each lane down to the field of ``used`` bits that ``low`` masks."""
    return (word & low) | ((word >> np.uint64(place - used)) & (low << np.uint64(used)))


@inlined
def _opened(word: np.uint64, low: np.uint64, used: int, place: int) -> np.uint64:
    """Undo :func:`_closed`."""
    return (word & low) | ((word << np.uint64(place - used)) & (low << np.uint64(place)))


@inlined
def _lanes(lane: int, used: int) -> np.uint64:
    """Return a word whose lanes of ``lane`` bits each have their low ``used`` bits set."""
    mask = np.uint64(0)
    ones = ~np.uint64(0) >> np.uint64(64 - used)
    for start in range(0, 64, lane):
        mask |= ones << np.uint64(start)
    return mask


# The number of bytes is written out below: the compiler turns a loop over a known number into straight, vectorised
# code, which is four times as fast.


@numba.njit(inline="always")
def _store_bytes(words: np.ndarray, count: int, packed: np.ndarray) -> None:
    for i in range(words.size):
        for byte in range(count):
            packed[i * count + byte] = np.uint8(words[i] >> np.uint64(8 * byte))


@numba.njit(inline="always")
def _load_bytes(packed: np.ndarray, count: int, words: np.ndarray) -> None:
    for i in range(words.size):
        word = np.uint64(0)
        for byte in range(count):
            word |= np.uint64(packed[i * count + byte]) << np.uint64(8 * byte)
        words[i] = word


@inlined
def _store(words: np.ndarray, count: int, packed: np.ndarray) -> None:
    if count == 1:
        _store_bytes(words, 1, packed)
    elif count == 2:
        _store_bytes(words, 2, packed)
    elif count == 3:
        _store_bytes(words, 3, packed)
    elif count == 4:
        _store_bytes(words, 4, packed)
    else:
        _store_bytes(words, count, packed)


@inlined
def _load(packed: np.ndarray, count: int, words: np.ndarray) -> None:
    if count == 1:
        _load_bytes(packed, 1, words)
    elif count == 2:
        _load_bytes(packed, 2, words)
    elif count == 3:
        _load_bytes(packed, 3, words)
    elif count == 4:
        _load_bytes(packed, 4, words)
    else:
        _load_bytes(packed, count, words)


@kernel
def _pack(blocks: int, count: int, codes: int, bits: int, packed: int) -> None:
    source, stream = at(codes, count, np.uint8), at(packed, (count * bits + 7) // 8, np.uint8)
    step, low = BLOCK // 8 * bits, np.uint8((1 << bits) - 1)
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        words = np.zeros(BLOCK // 8, np.uint64)
        masked = words.view(np.uint8)
        for i in range(end - first):
            # a higher bit of a code would end up in its neighbours
            masked[i] = source[first + i] & low
        pack(words, bits, stream[block * step : (block + 1) * step])


@kernel
def _unpack(blocks: int, count: int, packed: int, bits: int, codes: int) -> None:
    stream, target = at(packed, (count * bits + 7) // 8, np.uint8), at(codes, count, np.uint8)
    step = BLOCK // 8 * bits
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        words = np.zeros(BLOCK // 8, np.uint64)
        unpack(stream[block * step : (block + 1) * step], bits, words)
        target[first:end] = words.view(np.uint8)[: end - first]
