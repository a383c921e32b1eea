"""Codes in groups on the CPU: threads share the groups of all rows, and a vector is one row.

What is done to a group is in :mod:`actbench.ops.groupquant.cpugroup`; here is where its elements, codes and noise lie.
Rows of their own widths come with the running sum of these, which says where their codes end.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from actbench.ops.bitpack.cpu import pack, unpack
from actbench.ops.cpu.compiled import BLOCK, at, kernel
from actbench.ops.cpu.halves import FLOAT32, KINDS, narrow
from actbench.ops.groupquant.cpugroup import noise_of, place_of, quantize, restore, values_of, word_of
from actbench.ops.groupquant.reference import NAN_WORD
from actbench.ops.noise import state_of

_MOST = 1024  # elements of the largest group


def encode(
    codes: Tensor, meta: Tensor, x: Tensor, bits: int, group_size: int, seed: int | Tensor, stochastic: bool
) -> None:
    """Encode a vector."""
    _write(meta, x[None], group_size, bits, 0, 0, codes.data_ptr(), codes.numel(), state_of(seed), stochastic)


def encode_rows(
    codes: Tensor,
    meta: Tensor,
    x: Tensor,
    widths: Tensor,
    total_bits: int,
    group_size: int,
    seed: int | Tensor,
    stochastic: bool,
) -> None:
    """Encode rows of their own widths; those whose codes would not fit are not written, and their words are NaN."""
    sums = widths.cumsum(0, dtype=torch.int64)
    places = 0, widths.data_ptr(), sums.data_ptr(), codes.data_ptr(), codes.numel()
    _write(meta, x, group_size, *places, state_of(seed), stochastic)


def words(meta: Tensor, x: Tensor, group_size: int) -> None:
    """Find the words of the groups of rows."""
    _write(meta, x, group_size, 0, 0, 0, 0, 0, np.uint64(0), False)


def _write(meta: Tensor, x: Tensor, group_size: int, *target: int | np.uint64) -> None:
    """Write the words of rows, and their codes where ``target``, the kernel's last arguments, says."""
    rows, columns = x.shape
    units = -(-meta.numel() // _per_unit(group_size))
    place = rows, columns, group_size, _per_unit(group_size), x.data_ptr(), KINDS[x.dtype]
    _encode(units * BLOCK, meta.data_ptr(), *place, *target)


def _per_unit(group_size: int) -> int:
    """Return how many groups are one unit of a thread's work, which takes about as long as a block elsewhere."""
    return max(1, BLOCK // group_size)


def decode(out: Tensor, codes: Tensor, meta: Tensor, bits: int, group_size: int, start: int, *_: object) -> None:
    """Decode elements of a vector."""
    source = codes.data_ptr(), codes.numel(), meta.data_ptr(), bits, 0, 0
    _read(out.view(1, -1), start, group_size, *source)


def decode_rows(out: Tensor, codes: Tensor, meta: Tensor, widths: Tensor, group_size: int, first_row: int) -> None:
    """Decode rows of their own widths."""
    words, sums = meta[first_row * -(-out.shape[1] // group_size) :], widths.cumsum(0, dtype=torch.int64)
    places = 0, widths[first_row:].data_ptr(), sums[first_row:].data_ptr()
    _read(out, 0, group_size, codes.data_ptr(), codes.numel(), words.data_ptr(), *places)


def _read(out: Tensor, start: int, group_size: int, *source: int) -> None:
    """Write elements of rows, from ``start`` of each on; ``source`` is the kernel's first arguments."""
    rows, columns = out.shape
    pieces = -(-(start + columns) // group_size) - start // group_size if columns else 0
    units = -(-rows * pieces // _per_unit(group_size))
    place = rows, columns, start, group_size, _per_unit(group_size), pieces, out.data_ptr(), KINDS[out.dtype]
    _decode(units * BLOCK, *source, *place)


@kernel
def _encode(
    units: int,
    meta: int,
    rows: int,
    columns: int,
    group_size: int,
    per_unit: int,
    x: int,
    kind: int,
    bits: int,
    widths: int,
    sums: int,
    codes: int,
    size: int,
    state: np.uint64,
    stochastic: bool,
) -> None:
    per_row = (columns + group_size - 1) // group_size
    found, stream = at(meta, rows * per_row, np.uint32), at(codes, size, np.uint8)
    for unit in prange(units):
        random, wide = np.full(_MOST // 4 + 1, 0x8000800080008000, np.uint64), np.empty(_MOST, np.uint32)
        eights = np.empty(_MOST // 8, np.uint64)
        for group in range(unit * per_unit, min((unit + 1) * per_unit, rows * per_row)):
            row, first = group // per_row, group % per_row * group_size
            count = min(group_size, columns - first)
            values = values_of(x, kind, row * columns + first, row * columns + first + count, wide)
            found[group] = word_of(values.view(np.int32), kind)
            width, start, end = place_of(row, bits, widths, sums, columns, size)
            if start >= 0:
                lanes = noise_of(state, stochastic, row * columns + first, count, random)
                eights[(count - 1) // 8] = np.uint64(0)
                quantize(values, found[group], width, lanes, eights.view(np.uint8))
                byte = start + first // 8 * width
                pack(eights[: (count + 7) // 8], width, stream[byte : min(end, byte + (count + 7) // 8 * width)])
            elif widths != 0:
                found[group] = np.uint32(NAN_WORD)


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
