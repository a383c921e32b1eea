"""SmaQ blocks on the CPU: threads share the blocks. What is done to one is in :mod:`actbench.ops.cpu.smaqblocks`."""

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor

from actbench.ops import noise
from actbench.ops.cpu.bitpack import pack, unpack
from actbench.ops.cpu.compiled import BLOCK, Kernel, at, inlined
from actbench.ops.cpu.groups import noise_of, values_of
from actbench.ops.cpu.halves import FLOAT16, FLOAT32, KINDS, narrow
from actbench.ops.cpu.smaqblocks import (
    HUGE,
    copy,
    fill,
    float_of,
    gather,
    keys_of,
    largest_of,
    limit,
    mean_of,
    part,
    quantize,
    restore,
)
from actbench.ops.smaqblocks import NAN_HALF
from actbench.ops.smaqformat import HEADER_BYTES, Format

_MOST = 1024  # elements of the largest block
_HEADER = HEADER_BYTES


def encode_into(packed: Tensor, x: Tensor, first_block: int, form: Format, seed: int, stochastic: bool) -> None:
    """Replace blocks by those of ``x``.

    Args:
        packed: uint8.
        x: float32, float16 or bfloat16, contiguous: whole blocks, or blocks up to the end.
        first_block: Index of the first block.
        form: Which SmaQ.
        seed: Of the noise.
        stochastic: False for the nearest code.
    """
    target = packed.data_ptr() + first_block * form.block_bytes
    sizes = form.packed_bytes(x.numel()), form.block_bytes, _per_unit(form.block)
    source = x.data_ptr(), KINDS[x.dtype], x.numel(), first_block
    state = np.uint64(noise.mixed(seed))
    _encode(_work(x.numel(), form.block), target, *sizes, *source, *form, state, stochastic)


def decode(packed: Tensor, first: int, form: Format, out: Tensor) -> None:
    """Write elements, from number ``first`` on, to all of a contiguous tensor.

    Args:
        packed: uint8.
        first: Index of the first element.
        form: Which SmaQ.
        out: float32, float16 or bfloat16.
    """
    skipped = first // form.block
    room, place = form.room(packed.numel()), (first % form.block, out.numel(), out.data_ptr(), KINDS[out.dtype])
    begin, size = skipped * form.block_bytes, packed.numel() - skipped * form.block_bytes
    sizes = size, form.block_bytes, _per_unit(form.block), room - skipped * form.block
    elements = first % form.block + out.numel() if out.numel() else 0
    _decode(_work(elements, form.block), packed.data_ptr() + begin, *sizes, *place, *form)


def _per_unit(block: int) -> int:
    """Return how many blocks are one unit of a thread's work, which takes about as long as one elsewhere."""
    return max(1, BLOCK // block)


def _work(count: int, block: int) -> int:
    """Return the elements that :class:`Kernel` is told, so many that it makes the units that there are."""
    return -(-count // (_per_unit(block) * block)) * BLOCK


# The usual width is written out because it takes a third of the time where the compiler knows it.


@inlined
def _pack(words: np.ndarray, bits: int, stream: np.ndarray) -> None:
    if bits == 6:
        pack(words, 6, stream)
    else:
        pack(words, bits, stream)


@inlined
def _unpack(stream: np.ndarray, bits: int, words: np.ndarray) -> None:
    if bits == 6:
        unpack(stream, 6, words)
    else:
        unpack(stream, bits, words)


@inlined
def _rest_start(count: int, main_bits: int) -> int:
    return _HEADER + (count + 7) // 8 * main_bits


@Kernel
def _encode(
    units: int,
    packed: int,
    size: int,
    block_bytes: int,
    per_unit: int,
    x: int,
    kind: int,
    total: int,
    first_block: int,
    main_bits: int,
    outlier_bits: int,
    outliers: int,
    block: int,
    state: np.uint64,
    stochastic: bool,
) -> None:
    stream, more = at(packed, size, np.uint8), outlier_bits - main_bits
    for unit in prange(units):
        random, wide = np.full(_MOST // 4 + 1, 0x8000800080008000, np.uint64), np.empty(_MOST, np.uint32)
        d, keys, header = np.empty(_MOST, np.float32), np.empty(_MOST, np.int32), np.empty(4, np.uint16)
        eights, rest_eights = np.empty(_MOST // 8, np.uint64), np.empty(_MOST // 8, np.uint64)
        codes, rests = eights.view(np.uint8), rest_eights.view(np.uint8)
        for index in range(unit * per_unit, min((unit + 1) * per_unit, (total + block - 1) // block)):
            first = index * block
            count = min(block, total - first)
            begin, end = index * block_bytes, min((index + 1) * block_bytes, size)
            rest, k = begin + _rest_start(count, main_bits), count * outliers // block
            values = values_of(x, kind, first, first + count, wide)
            largest = largest_of(values.view(np.int32))
            if largest >= HUGE:
                fill(stream[begin + _HEADER : end], 0)
                fill(header, NAN_HALF)
                copy(header.view(np.uint8), stream[begin : begin + _HEADER])
                continue
            header[0] = mean_of(values, largest)
            most = keys_of(values, float_of(header[0]), d, keys)
            cut = part(keys[:count], most, k, header[1:])
            lanes = noise_of(state, stochastic, first_block * block + first, count, random)
            eights[(count - 1) // 8] = np.uint64(0)
            quantize(d[:count], keys, cut, header[1:], (main_bits, outlier_bits), lanes, codes, rests)
            copy(header.view(np.uint8), stream[begin : begin + _HEADER])
            if more > 0:
                gather(codes[:count], main_bits, rests)
                used = (end - rest + more - 1) // more
                fill(rests[k : 8 * used], 0)
                pack(rest_eights[:used], more, stream[rest:end])
            _pack(eights[: (count + 7) // 8], main_bits, stream[begin + _HEADER : rest])


@Kernel
def _decode(
    units: int,
    packed: int,
    size: int,
    block_bytes: int,
    per_unit: int,
    room: int,
    start: int,
    total: int,
    out: int,
    kind: int,
    main_bits: int,
    outlier_bits: int,
    outliers: int,
    block: int,
) -> None:
    stream, more = at(packed, size, np.uint8), outlier_bits - main_bits
    for unit in prange(units):
        eights, rest_eights = np.zeros(_MOST // 8, np.uint64), np.zeros(_MOST // 8, np.uint64)
        places, wide, header = np.empty(_MOST + 1, np.int16), np.empty(_MOST, np.uint32), np.empty(4, np.uint16)
        for index in range(unit * per_unit, min((unit + 1) * per_unit, (start + total + block - 1) // block)):
            count = min(block, room - index * block)
            begin, end = index * block_bytes, min((index + 1) * block_bytes, size)
            rest = begin + _rest_start(count, main_bits)
            copy(stream[begin : begin + _HEADER], header.view(np.uint8))
            _unpack(stream[begin + _HEADER : rest], main_bits, eights[: count // 8])
            if more > 0:
                unpack(stream[rest:end], more, rest_eights[: (end - rest + more - 1) // more])
            values = wide[:count].view(np.float32)
            codes, rests = eights.view(np.uint8)[:count], rest_eights.view(np.uint8)
            restore(codes, rests, header, (main_bits, outlier_bits), places, values)
            low, high = max(start - index * block, 0), min(start + total - index * block, count)
            target = index * block + low - start
            if kind == FLOAT32:
                narrow(wide[low:high], kind, at(out + 4 * target, high - low, np.uint32))
                continue
            if kind == FLOAT16:
                limit(values)
            narrow(wide[low:high], kind, at(out + 2 * target, high - low, np.uint16))
