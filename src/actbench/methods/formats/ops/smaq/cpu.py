"""SmaQ blocks on the CPU: threads share the blocks; :mod:`.cpublock` computes the codes of one block."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import prange
from torch import Tensor

from actbench.methods.actnn.ops.groupquant.cpu import per_unit, values_of
from actbench.methods.formats.ops.smaq.cpublock import (
    HUGE,
    HUGE_MEAN,
    copy,
    fill,
    float_of,
    gather,
    keys_of,
    limit,
    mean_of,
    part,
    quantize,
    restore,
)
from actbench.methods.formats.ops.smaq.format import HEADER_BYTES, Format
from actbench.methods.formats.ops.smaq.reference import NAN_HALF
from actbench.ops.bitpack.cpu import pack, unpack
from actbench.ops.cpu import BLOCK, at, inlined, kernel
from actbench.ops.cpu.halves import FLOAT16, FLOAT32, KINDS, fill_noise, narrow, state_at

MOST = 1024
"""Elements of the largest block."""


def work_of(count: int, block: int) -> int:
    """Return the number of elements to pass to a kernel, so that it runs the right number of units."""
    return -(-count // (per_unit(block) * block)) * BLOCK


class Work(NamedTuple):
    """Buffers for one block; a thread reuses them for all its blocks.

    Attributes:
        noise: float32 noise and 256.
        d: float32 differences from the mean.
        keys: int16, the upper bits of their magnitudes.
        header: uint16, the four numbers of the header.
        eights: uint64, each with eight codes.
        rest_eights: The same for the high bits of the outliers.
        places: int16, the indexes of the outliers.
    """

    noise: np.ndarray
    d: np.ndarray
    keys: np.ndarray
    header: np.ndarray
    eights: np.ndarray
    rest_eights: np.ndarray
    places: np.ndarray


@inlined
def workspace() -> Work:
    """Return buffers for any block; their noise rounds to the nearest until it is filled."""
    # 256 and the half that makes the code the nearest one
    noise = np.full(MOST, 256.5, np.float32)
    d, keys, header = np.empty(MOST, np.float32), np.empty(MOST, np.int16), np.empty(4, np.uint16)
    return Work(
        noise,
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
    part_of: tuple[int, int],
    first: int,
    state: np.uint64,
    stochastic: bool,
    work: Work,
    packed: np.ndarray,
) -> None:
    """Encode a block of float32 ``values`` to all of its bytes, ``packed``.

    ``bits`` are those of main codes and of outlier codes, ``part_of`` the outliers of a whole block and its size; the
    noise is that of a state, from element ``first`` on. Without ``stochastic`` codes are the nearest, and the noise of
    ``work`` stays as :func:`workspace` has set it.
    """
    count, header, more = values.size, work.header, bits[1] - bits[0]
    outliers = count * part_of[0] // part_of[1]
    d, keys, codes, rests = (
        work.d[:count],
        work.keys[:count],
        work.eights.view(np.uint8),
        work.rest_eights.view(np.uint8),
    )
    header[0] = mean_of(values, part_of[1], work.d)
    most = keys_of(values, float_of(header[0]), d, keys)
    if most >= HUGE or header[0] & 0x7FFF >= HUGE_MEAN:
        fill(packed[HEADER_BYTES:], 0)
        fill(header, NAN_HALF)
        copy(header.view(np.uint8), packed[:HEADER_BYTES])
        return
    cut = part(keys, most, outliers, header[1:])
    if stochastic:
        for unit in range((count + 31) // 32):
            fill_noise(state, first // 32 + unit, 1, work.noise[32 * unit : 32 * unit + 32])
    # codes that the block does not have are bits of the stream, and zero
    work.eights[(count - 1) // 8] = np.uint64(0)
    quantize(d, keys, cut, header[1:], bits, work.noise, codes, rests)
    copy(header.view(np.uint8), packed[:HEADER_BYTES])
    rest = _rest_start(count, bits[0])
    if more > 0:
        gather(codes[:count], bits[0], rests)
        used = (packed.size - rest + more - 1) // more
        fill(rests[outliers : 8 * used], 0)
        _pack_known(work.rest_eights[:used], more, packed[rest:])
    _pack_known(work.eights[: (count + 7) // 8], bits[0], packed[HEADER_BYTES:rest])


@inlined
def read_block(packed: np.ndarray, bits: tuple[int, int], work: Work, values: np.ndarray) -> None:
    """Decode the first elements of a block to ``values``, float32; the header stays in ``work``."""
    count, more = values.size, bits[1] - bits[0]
    rest = _rest_start(count, bits[0])
    copy(packed[:HEADER_BYTES], work.header.view(np.uint8))
    _unpack_known(packed[HEADER_BYTES:rest], bits[0], work.eights[: (count + 7) // 8])
    if more > 0:
        _unpack_known(packed[rest:], more, work.rest_eights[: (packed.size - rest + more - 1) // more])
    codes, rests = work.eights.view(np.uint8)[:count], work.rest_eights.view(np.uint8)
    restore(codes, rests, work.header, bits, work.places, values)


@inlined
def _rest_start(count: int, main_bits: int) -> int:
    return HEADER_BYTES + (count + 7) // 8 * main_bits


# The usual widths are written out: where the compiler knows them, they take a third of the time.


@inlined
def _pack_known(words: np.ndarray, bits: int, stream: np.ndarray) -> None:
    if bits == 6:
        pack(words, 6, stream)
    elif bits == 1:
        pack(words, 1, stream)
    else:
        pack(words, bits, stream)


@inlined
def _unpack_known(stream: np.ndarray, bits: int, words: np.ndarray) -> None:
    if bits == 6:
        unpack(stream, 6, words)
    elif bits == 1:
        unpack(stream, 1, words)
    else:
        unpack(stream, bits, words)


def encode(packed: Tensor, x: Tensor, seed: Tensor, stochastic: bool, *parts: int) -> None:
    """Encode the elements of a tensor."""
    form = Format(*parts)
    sizes = packed.numel(), form.block_bytes, per_unit(form.block)
    source = x.data_ptr(), KINDS[x.dtype], x.numel()
    _encode(work_of(x.numel(), form.block), packed.data_ptr(), *sizes, *source, *form, seed.data_ptr(), stochastic)


def decode(out: Tensor, packed: Tensor, first: int, *others: Any) -> None:
    """Decode elements from number ``first`` on; the format is the last of ``others``."""
    form = Format(*others[-len(Format._fields) :])
    skipped = first // form.block
    room, place = form.room(packed.numel()), (first % form.block, out.numel(), out.data_ptr(), KINDS[out.dtype])
    begin, size = skipped * form.block_bytes, packed.numel() - skipped * form.block_bytes
    sizes = size, form.block_bytes, per_unit(form.block), room - skipped * form.block
    elements = first % form.block + out.numel() if out.numel() else 0
    _decode(work_of(elements, form.block), packed.data_ptr() + begin, *sizes, *place, *form)


@kernel
def _encode(
    units: int,
    packed: int,
    size: int,
    block_bytes: int,
    per_unit: int,
    x: int,
    kind: int,
    total: int,
    main_bits: int,
    outlier_bits: int,
    outliers: int,
    block: int,
    seed: int,
    stochastic: bool,
) -> None:
    stream = at(packed, size, np.uint8)
    state = state_at(seed) if stochastic else np.uint64(0)
    for unit in prange(units):
        work, wide = workspace(), np.empty(MOST, np.uint32)
        for index in range(unit * per_unit, min((unit + 1) * per_unit, (total + block - 1) // block)):
            first = index * block
            count = min(block, total - first)
            values = values_of(x, kind, first, first + count, wide)
            bytes_of = stream[index * block_bytes : min((index + 1) * block_bytes, size)]
            write_block(values, (main_bits, outlier_bits), (outliers, block), first, state, stochastic, work, bytes_of)


@kernel
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
    stream = at(packed, size, np.uint8)
    for unit in prange(units):
        work, wide = workspace(), np.empty(MOST, np.uint32)
        for index in range(unit * per_unit, min((unit + 1) * per_unit, (start + total + block - 1) // block)):
            count = min(block, room - index * block)
            values = wide[:count].view(np.float32)
            bytes_of = stream[index * block_bytes : min((index + 1) * block_bytes, size)]
            read_block(bytes_of, (main_bits, outlier_bits), work, values)
            low, high = max(start - index * block, 0), min(start + total - index * block, count)
            target = index * block + low - start
            if kind == FLOAT32:
                narrow(wide[low:high], kind, at(out + 4 * target, high - low, np.uint32))
                continue
            if kind == FLOAT16:
                limit(values)
            narrow(wide[low:high], kind, at(out + 2 * target, high - low, np.uint16))
