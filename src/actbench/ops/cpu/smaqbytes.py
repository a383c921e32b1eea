"""The bytes of one SmaQ block: written from numbers, and read as numbers. What a code is: :mod:`.smaqblocks`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from actbench.ops.cpu.bitpack import pack, unpack
from actbench.ops.cpu.compiled import BLOCK, inlined
from actbench.ops.cpu.groups import noise_of
from actbench.ops.cpu.smaqblocks import (
    HUGE,
    copy,
    fill,
    float_of,
    gather,
    keys_of,
    largest_of,
    mean_of,
    part,
    quantize,
    restore,
)
from actbench.ops.smaqblocks import NAN_HALF
from actbench.ops.smaqformat import HEADER_BYTES

MOST = 1024
"""Elements of the largest block."""

_HEADER = HEADER_BYTES


def per_unit(block: int) -> int:
    """Return how many blocks are one unit of a thread's work, which takes about as long as one elsewhere."""
    return max(1, BLOCK // block)


def work_of(count: int, block: int) -> int:
    """Return the elements that a kernel is told, so many that it makes the units that there are."""
    return -(-count // (per_unit(block) * block)) * BLOCK


class Work(NamedTuple):
    """Room for what is known of one block only; a thread's work on many blocks takes one.

    Attributes:
        random: uint64, four numbers of noise in each.
        d: float32 differences from the mean.
        keys: int32, their magnitudes' bits.
        header: uint16, the four numbers of the header.
        eights: uint64, eight codes in each.
        rest_eights: The same, of the outliers' high bits.
        places: int16, indexes of the outliers.
    """

    random: np.ndarray
    d: np.ndarray
    keys: np.ndarray
    header: np.ndarray
    eights: np.ndarray
    rest_eights: np.ndarray
    places: np.ndarray


@inlined
def workspace() -> Work:
    """Return room for any block; its noise rounds to the nearest until it is filled."""
    random = np.full(MOST // 4 + 1, 0x8000800080008000, np.uint64)
    d, keys, header = np.empty(MOST, np.float32), np.empty(MOST, np.int32), np.empty(4, np.uint16)
    return Work(
        random,
        d,
        keys,
        header,
        np.zeros(MOST // 8, np.uint64),
        np.zeros(MOST // 8, np.uint64),
        np.empty(MOST + 1, np.int16),
    )


@inlined
def write_block(
    values: np.ndarray,
    bits: tuple[int, int],
    outliers: int,
    first: int,
    state: np.uint64,
    stochastic: bool,
    work: Work,
    packed: np.ndarray,
) -> None:
    """Write a block.

    Args:
        values: float32, its elements.
        bits: Of main codes and of outliers' codes.
        outliers: How many of the elements are.
        first: Index of the first element among all, for the noise.
        state: Of the noise.
        stochastic: False for the nearest code, as :func:`workspace` prepares it.
        work: Overwritten, but for the noise where it is not stochastic.
        packed: uint8, all bytes of the block.
    """
    count, header, more = values.size, work.header, bits[1] - bits[0]
    largest = largest_of(values.view(np.int32))
    if largest >= HUGE:
        fill(packed[_HEADER:], 0)
        fill(header, NAN_HALF)
        copy(header.view(np.uint8), packed[:_HEADER])
        return
    header[0] = mean_of(values, largest)
    d, keys, codes, rests = (
        work.d[:count],
        work.keys[:count],
        work.eights.view(np.uint8),
        work.rest_eights.view(np.uint8),
    )
    most = keys_of(values, float_of(header[0]), d, keys)
    cut = part(keys, most, outliers, header[1:])
    lanes = noise_of(state, stochastic, first, count, work.random)
    work.eights[(count - 1) // 8] = np.uint64(0)
    quantize(d, keys, cut, header[1:], bits, lanes, codes, rests)
    copy(header.view(np.uint8), packed[:_HEADER])
    rest = _rest_start(count, bits[0])
    if more > 0:
        gather(codes[:count], bits[0], rests)
        used = (packed.size - rest + more - 1) // more
        fill(rests[outliers : 8 * used], 0)
        _pack(work.rest_eights[:used], more, packed[rest:])
    _pack(work.eights[: (count + 7) // 8], bits[0], packed[_HEADER:rest])


@inlined
def read_block(packed: np.ndarray, bits: tuple[int, int], work: Work, values: np.ndarray) -> None:
    """Read a block.

    Args:
        packed: uint8, all bytes of the block.
        bits: Of main codes and of outliers' codes.
        work: Overwritten, but for the noise; the header is left in it.
        values: float32, for the first so many elements; overwritten.
    """
    count, more = values.size, bits[1] - bits[0]
    rest = _rest_start(count, bits[0])
    copy(packed[:_HEADER], work.header.view(np.uint8))
    _unpack(packed[_HEADER:rest], bits[0], work.eights[: (count + 7) // 8])
    if more > 0:
        _unpack(packed[rest:], more, work.rest_eights[: (packed.size - rest + more - 1) // more])
    codes, rests = work.eights.view(np.uint8)[:count], work.rest_eights.view(np.uint8)
    restore(codes, rests, work.header, bits, work.places, values)


@inlined
def _rest_start(count: int, main_bits: int) -> int:
    return _HEADER + (count + 7) // 8 * main_bits


# The usual widths are written out because they take a third of the time where the compiler knows them.


@inlined
def _pack(words: np.ndarray, bits: int, stream: np.ndarray) -> None:
    if bits == 6:
        pack(words, 6, stream)
    elif bits == 1:
        pack(words, 1, stream)
    else:
        pack(words, bits, stream)


@inlined
def _unpack(stream: np.ndarray, bits: int, words: np.ndarray) -> None:
    if bits == 6:
        unpack(stream, 6, words)
    elif bits == 1:
        unpack(stream, 1, words)
    else:
        unpack(stream, bits, words)
