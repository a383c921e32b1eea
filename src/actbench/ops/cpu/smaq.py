"""SmaQ blocks on the CPU: threads share the blocks. What is done to one is in :mod:`actbench.ops.cpu.smaqbytes`."""

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor

from actbench.ops import noise
from actbench.ops.cpu.compiled import at, kernel
from actbench.ops.cpu.groups import values_of
from actbench.ops.cpu.halves import FLOAT16, FLOAT32, KINDS, narrow
from actbench.ops.cpu.smaqblocks import limit
from actbench.ops.cpu.smaqbytes import MOST, per_unit, read_block, work_of, workspace, write_block
from actbench.ops.smaqformat import Format


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
    sizes = form.packed_bytes(x.numel()), form.block_bytes, per_unit(form.block)
    source = x.data_ptr(), KINDS[x.dtype], x.numel(), first_block
    state = np.uint64(noise.mixed(seed))
    _encode(work_of(x.numel(), form.block), target, *sizes, *source, *form, state, stochastic)


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
    first_block: int,
    main_bits: int,
    outlier_bits: int,
    outliers: int,
    block: int,
    state: np.uint64,
    stochastic: bool,
) -> None:
    stream = at(packed, size, np.uint8)
    for unit in prange(units):
        work, wide = workspace(), np.empty(MOST, np.uint32)
        for index in range(unit * per_unit, min((unit + 1) * per_unit, (total + block - 1) // block)):
            first = index * block
            count = min(block, total - first)
            values = values_of(x, kind, first, first + count, wide)
            bytes_of = stream[index * block_bytes : min((index + 1) * block_bytes, size)]
            noise_from = first_block * block + first
            k = count * outliers // block
            write_block(values, (main_bits, outlier_bits), k, noise_from, state, stochastic, work, bytes_of)


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
