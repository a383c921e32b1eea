"""Few-bit derivatives on the CPU, a block at a time.

Codes of up to 4 bits are made in vectors. The elements left over, and more bits, are first encoded, then packed, in
loops that the compiler vectorises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import prange
from numba.np.unsafe import ndarray as unsafe
from torch import Tensor

from actbench.ops.bitpack.cpu import pack, unpack
from actbench.ops.cpu import BLOCK, at, inlined, intrinsic, kernel
from actbench.ops.cpu.halves import FLOAT32, KINDS, clear_signs, narrow, widen
from actbench.ops.cpu.vectors import BYTE, FLOAT, INT, LONG, MANY, TABLE, VALUES, Step, emitted

_DECODED = 64  # values that one step decodes
_SOME = 16  # lanes of a vector in decoding


def encode(packed: Tensor, x: Tensor, bounds: Tensor, bits: int, fold: bool) -> None:
    """Pack, for each element, how many bounds lie strictly below it."""
    count = x.numel()
    _encode(count, count, x.data_ptr(), KINDS[x.dtype], bounds.data_ptr(), bits, fold, packed.data_ptr())


def decode(out: Tensor, packed: Tensor, levels: Tensor, grad: Tensor, bits: int) -> None:
    """Multiply each gradient by the level of its code."""
    count, kind = grad.numel(), KINDS[grad.dtype]
    _decode(count, count, packed.data_ptr(), levels.data_ptr(), grad.data_ptr(), kind, bits, out.data_ptr())


def _packed(step: Step, found: list[Any]) -> Any:
    """Return the packed codes of 32 lanes as bytes; ``found`` is their bits, lowest first.

    Does as :mod:`actbench.ops.bitpack.cpu`, in registers.
    """
    builder, bits, byte = step.builder, len(found), ir.VectorType(BYTE, MANY)
    if bits == 1:
        return builder.bitcast(found[0], ir.IntType(MANY))
    code = ir.Constant(byte, [0] * MANY)
    for bit, mask in enumerate(found):
        code = builder.select(mask, builder.add(code, step.every(code, 1 << bit)), code)
    words = builder.bitcast(code, ir.VectorType(LONG, MANY // 8))
    for lane, used in ((16, bits), (32, 2 * bits), (64, 4 * bits)):
        low = sum(((1 << used) - 1) << start for start in range(0, 64, lane))
        moved = builder.lshr(words, step.every(words, lane // 2 - used))
        kept, brought = step.every(words, low), step.every(words, low << used)
        words = builder.or_(builder.and_(words, kept), builder.and_(moved, brought))
    full = [8 * word + byte for word in range(MANY // 8) for byte in range(bits)]
    stream = builder.bitcast(words, byte)
    return builder.shuffle_vector(stream, stream, ir.Constant(ir.VectorType(INT, len(full)), full))


@intrinsic
def _encode_lanes(typing_context: Any, index: Any, values: Any, bounds: Any, packed: Any) -> Any:
    """Pack, for 32 float32 values from ``index`` on, a multiple of 32, how many bounds are below each.

    No bound is below NaN. ``bounds`` is a tuple of 1, 3, 7 or 15 float32 numbers, ascending, for 1 to 4 bits.
    """

    def emit(step: Step, place: Any) -> None:
        builder, value = step.builder, step.load(1, place, VALUES)
        spread = [step.spread(bound, MANY) for bound in step.entries(2)]
        found: list[Any] = []  # bits of the codes, highest first, by halving the bounds
        for bit in reversed(range(len(spread).bit_length())):
            bound = step.chosen(found[::-1], spread[(1 << bit) - 1 :: 2 << bit])
            found.append(builder.fcmp_ordered(">", value, bound))
        stream = _packed(step, found[::-1])
        step.store(stream, 3, builder.mul(builder.lshr(place, LONG(3)), LONG(len(found))))

    return emitted(emit, index, values, bounds, packed)


@intrinsic
def _scale(typing_context: Any, index: Any, packed: Any, levels: Any, values: Any, out: Any) -> Any:
    """Write 64 float32 values from ``index`` on, a multiple of 64, each times the level of its packed code.

    ``levels`` is a tuple of 2, 4, 8 or 16 float32 numbers, for 1 to 4 bits. All values are read before the first is
    written, which is faster from memory.
    """

    def emit(step: Step, index: Any) -> None:
        builder, entries = step.builder, step.entries(2)
        bits = len(entries).bit_length() - 1
        places = [builder.add(index, LONG(first)) for first in range(0, _DECODED, _SOME)]
        codes = [_codes_at(step, place, bits) for place in places]
        values = [step.load(3, place, ir.VectorType(FLOAT, _SOME)) for place in places]
        for place, code, value in zip(places, codes, values, strict=True):
            step.store(builder.fmul(value, _level(step, code, bits, entries)), 4, place)

    return emitted(emit, index, packed, levels, values, out)


def _codes_at(step: Step, index: Any, bits: int) -> Any:
    """Return the codes of 16 values, with other bits above them.

    Each lane shifts the bits of its own code down in a 32-bit word; from 3 bits on, eight lanes share one word.
    """
    builder = step.builder
    words = 1 if bits <= 2 else 2
    second = 2 * bits - 4  # byte at which the second word starts, so that it ends with the last code
    places = [bits * lane - (8 * second if words == 2 and lane >= 8 else 0) for lane in range(_SOME)]
    width = ir.IntType(8 * min(2 * bits, 4))
    lanes = ir.VectorType(INT, _SOME)
    byte = builder.mul(builder.lshr(index, LONG(3)), LONG(bits))
    word = step.spread(builder.zext(step.load(1, byte, width), INT), _SOME)
    if words == 2:
        after = step.spread(step.load(1, builder.add(byte, LONG(second)), width), _SOME)
        halves = ir.Constant(lanes, [lane if lane < 8 else _SOME + lane for lane in range(_SOME)])
        word = builder.shuffle_vector(word, after, halves)
    return builder.lshr(word, ir.Constant(lanes, places))


def _level(step: Step, code: Any, bits: int, entries: list[Any]) -> Any:
    """Return the levels of 16 codes."""
    builder = step.builder
    low = builder.and_(code, step.every(code, min(1 << bits, TABLE) - 1))
    level = step.looked_up(low, entries[:TABLE])
    if bits < 4:
        return level
    upper = builder.icmp_unsigned("!=", builder.and_(code, step.every(code, TABLE)), step.every(code, 0))
    return builder.select(upper, step.looked_up(low, entries[TABLE:]), level)


_in_registers: Any = unsafe.to_fixed_tuple


@inlined
def _encode_block(values: np.ndarray, bounds: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """Write how many bounds are below each value; no bound is below NaN."""
    done = values.size // MANY * MANY if bits <= 4 else 0
    if bits == 1:
        one = _in_registers(bounds, 1)
        for i in range(0, done, MANY):
            _encode_lanes(i, values, one, packed)
    elif bits == 2:
        three = _in_registers(bounds, 3)
        for i in range(0, done, MANY):
            _encode_lanes(i, values, three, packed)
    elif bits == 3:
        seven = _in_registers(bounds, 7)
        for i in range(0, done, MANY):
            _encode_lanes(i, values, seven, packed)
    elif bits == 4:
        fifteen = _in_registers(bounds, 15)
        for i in range(0, done, MANY):
            _encode_lanes(i, values, fifteen, packed)
    if done < values.size:
        words = np.zeros(BLOCK // 8, np.uint64)
        _count_below(values[done:], bounds, words.view(np.uint8))
        pack(words, bits, packed[done // 8 * bits :])


@inlined
def _count_below(values: np.ndarray, bounds: np.ndarray, codes: np.ndarray) -> None:
    """Count two bounds a pass, which vectorises."""
    first = bounds[0]
    for i in range(values.size):
        codes[i] = np.uint8(values[i] > first)
    for pair in range(1, bounds.size, 2):
        lower, upper = bounds[pair], bounds[pair + 1]
        for i in range(values.size):
            codes[i] = np.uint8(codes[i] + np.uint8(values[i] > lower) + np.uint8(values[i] > upper))


@inlined
def _scale_block(packed: np.ndarray, levels: np.ndarray, bits: int, grad: np.ndarray, out: np.ndarray) -> None:
    """Write ``grad * levels[code]``."""
    done = grad.size // _DECODED * _DECODED if bits <= 4 else 0
    if bits == 1:
        two = _in_registers(levels, 2)
        for i in range(0, done, _DECODED):
            _scale(i, packed, two, grad, out)
    elif bits == 2:
        four = _in_registers(levels, 4)
        for i in range(0, done, _DECODED):
            _scale(i, packed, four, grad, out)
    elif bits == 3:
        eight = _in_registers(levels, 8)
        for i in range(0, done, _DECODED):
            _scale(i, packed, eight, grad, out)
    elif bits == 4:
        sixteen = _in_registers(levels, 16)
        for i in range(0, done, _DECODED):
            _scale(i, packed, sixteen, grad, out)
    _scale_rest(packed[done // 8 * bits :], levels, bits, grad[done:], out[done:])


@inlined
def _scale_rest(packed: np.ndarray, levels: np.ndarray, bits: int, grad: np.ndarray, out: np.ndarray) -> None:
    """Write ``grad * levels[code]``, code by code."""
    if grad.size > 0:
        words = np.empty(BLOCK // 8, np.uint64)
        unpack(packed, bits, words)
        codes = words.view(np.uint8)
        for i in range(grad.size):
            out[i] = grad[i] * levels[codes[i]]


@kernel
def _encode(blocks: int, count: int, x: int, kind: int, bounds: int, bits: int, fold: bool, packed: int) -> None:
    table = at(bounds, (1 << bits) - 1, np.float32)
    stream = at(packed, (count * bits + 7) // 8, np.uint8)
    step = BLOCK // 8 * bits
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        if kind == FLOAT32 and not fold:
            values = at(x, count, np.float32)[first:end]
        else:
            wide = np.empty(end - first, np.uint32)
            if kind == FLOAT32:
                widen(at(x, count, np.uint32)[first:end], kind, wide)
            else:
                widen(at(x, count, np.uint16)[first:end], kind, wide)
            if fold:
                clear_signs(wide)
            values = wide.view(np.float32)
        _encode_block(values, table, bits, stream[block * step : (block + 1) * step])


@kernel
def _decode(blocks: int, count: int, packed: int, levels: int, grad: int, kind: int, bits: int, out: int) -> None:
    table = at(levels, 1 << bits, np.float32)
    stream = at(packed, (count * bits + 7) // 8, np.uint8)
    step = BLOCK // 8 * bits
    for block in prange(blocks):
        first, end = block * BLOCK, min(count, (block + 1) * BLOCK)
        codes = stream[block * step : (block + 1) * step]
        if kind == FLOAT32:
            source, target = at(grad, count, np.float32)[first:end], at(out, count, np.float32)[first:end]
            _scale_block(codes, table, bits, source, target)
        else:
            wide, product = np.empty(end - first, np.uint32), np.empty(end - first, np.uint32)
            widen(at(grad, count, np.uint16)[first:end], kind, wide)
            _scale_block(codes, table, bits, wide.view(np.float32), product.view(np.float32))
            narrow(product, kind, at(out, count, np.uint16)[first:end])
