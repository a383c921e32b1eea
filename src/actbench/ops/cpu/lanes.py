"""Steps on many elements at once: encoding, decoding and masks.

Counts are multiples of the values of a step; callers see to what is left over.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from actbench.ops.cpu.compiled import intrinsic
from actbench.ops.cpu.vectors import BYTE, FLOAT, INT, LONG, TABLE, Step, emitted, quick_deposits

MANY, DECODED, AT_ONCE = 32, 64, 128
"""Values of a step of encoding, of a step of decoding, and of one that only reads and writes."""

SOME = 16
"""Lanes in which codes are decoded."""

VALUES = ir.VectorType(FLOAT, MANY)


def store_codes(step: Step, value: Any, index: Any, bounds: int, packed: int) -> None:
    """Write the packed codes of 32 values; bounds and stream are the arguments of these numbers."""
    builder = step.builder
    spread = [step.spread(bound, MANY) for bound in step.entries(bounds)]
    bits = len(spread).bit_length()
    found: list[Any] = []  # bits of the codes, highest first: halving among the bounds
    for bit in reversed(range(bits)):
        bound = step.chosen(found[::-1], spread[(1 << bit) - 1 :: 2 << bit])
        found.append(builder.fcmp_ordered(">", value, bound))
    place = builder.mul(builder.lshr(index, LONG(3)), LONG(bits))
    for part in _streams(step, found[::-1]):
        step.store(part, packed, place)
        place = builder.add(place, LONG(bits * MANY // 8 // 2))


def _streams(step: Step, found: list[Any]) -> list[Any]:
    """Return the packed codes of 32 lanes, given by their bits, lowest first: in one piece, or in two halves."""
    if len(found) == 1:
        return [step.builder.bitcast(found[0], ir.IntType(MANY))]
    return [_woven(step, found, half) for half in range(2)] if quick_deposits() else [_closed(step, found)]


def _woven(step: Step, found: list[Any], half: int) -> Any:
    """Return half of the stream as an integer: other units than those of vectors compute it, which are idle then."""
    builder, bits, lanes = step.builder, len(found), MANY // 2
    stream = LONG(0)
    for bit, mask in enumerate(found):
        taken = builder.zext(builder.bitcast(mask, ir.IntType(MANY)), LONG)
        taken = builder.lshr(taken, LONG(half * lanes))
        places = sum(1 << (bits * lane + bit) for lane in range(lanes))
        stream = builder.or_(stream, step.deposited(taken, places))
    return builder.trunc(stream, ir.IntType(bits * lanes))


def _closed(step: Step, found: list[Any]) -> Any:
    """Return the stream as bytes; as in :mod:`actbench.ops.cpu.bitpack`, in registers."""
    builder, bits, byte = step.builder, len(found), ir.VectorType(BYTE, MANY)
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
def encode(typing_context: Any, index: Any, values: Any, bounds: Any, packed: Any) -> Any:
    """Pack, for 32 values, how many bounds are below each; none is below NaN.

    Args:
        typing_context: Numba's; callers leave it out.
        index: Of the first value, a multiple of 32.
        values: float32.
        bounds: A tuple of 1, 3, 7 or 15 float32 numbers, ascending, for 1 to 4 bits.
        packed: uint8, the codes of all values.
    """

    def emit(step: Step, place: Any) -> None:
        store_codes(step, step.load(1, place, VALUES), place, 2, 3)

    return emitted(emit, index, values, bounds, packed)


def _scaled(bits: int) -> Any:
    """Return a step that multiplies 64 values by the levels of their packed codes.

    All are read before the first is written, which takes less time where they come from memory.
    """

    def emit(step: Step, index: Any) -> None:
        builder = step.builder
        entries = step.entries(2)
        places = [builder.add(index, LONG(first)) for first in range(0, DECODED, SOME)]
        codes = [_codes_at(step, place, bits) for place in places]
        values = [step.load(3, place, ir.VectorType(FLOAT, SOME)) for place in places]
        for place, code, value in zip(places, codes, values, strict=True):
            step.store(builder.fmul(value, _level(step, code, bits, entries)), 4, place)

    @intrinsic
    def scale(typing_context: Any, index: Any, packed: Any, levels: Any, values: Any, out: Any) -> Any:
        return emitted(emit, index, packed, levels, values, out)

    return scale


def _codes_at(step: Step, index: Any, bits: int) -> Any:
    """Read the codes of 16 values, with other bits above them.

    Each lane looks at the bits of its own code in a 32-bit word; from 3 bits on, eight lanes share one.
    """
    builder = step.builder
    words = 1 if bits <= 2 else 2
    second = 2 * bits - 4  # byte at which the second word starts, so that it ends with the last code
    places = [bits * lane - (8 * second if words == 2 and lane >= 8 else 0) for lane in range(SOME)]
    width = ir.IntType(8 * min(2 * bits, 4))
    lanes = ir.VectorType(INT, SOME)
    byte = builder.mul(builder.lshr(index, LONG(3)), LONG(bits))
    word = step.spread(builder.zext(step.load(1, byte, width), INT), SOME)
    if words == 2:
        after = step.spread(step.load(1, builder.add(byte, LONG(second)), width), SOME)
        halves = ir.Constant(lanes, [lane if lane < 8 else SOME + lane for lane in range(SOME)])
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


scale1, scale2, scale3, scale4 = (_scaled(bits) for bits in range(1, 5))
"""Write, for 64 values from ``index`` on, a multiple of 64, each times the level of its code of 1 to 4 bits.

Args:
    index: Of the first value.
    packed: uint8, the codes of all values.
    levels: ``2**bits`` float32 numbers.
    values: float32.
    out: float32.
"""


@intrinsic
def positive(typing_context: Any, index: Any, x: Any, infinity: Any, out: Any, mask: Any) -> Any:
    """Write ReLU of 32 values and, as one bit each, whether they are above zero or NaN.

    A negative zero stays one, as in torch on the CPU.

    Args:
        typing_context: Numba's; callers leave it out.
        index: Of the first value, a multiple of 32.
        x: Bits of the values: uint32, or uint16 for the half types.
        infinity: Bits of negative infinity.
        out: As x.
        mask: uint8, the bits of all values.
    """

    def emit(step: Step, index: Any) -> None:
        builder, width = step.builder, signature.args[1].dtype.bitwidth
        vector = ir.VectorType(ir.IntType(width), MANY)
        value, zero = step.load(1, index, vector), ir.Constant(vector, [0] * MANY)
        below_all = step.spread(step.argument(2, ir.IntType(width)), MANY)
        above = builder.icmp_signed(">", value, zero)
        passed = builder.or_(above, builder.icmp_unsigned(">", value, below_all))
        minus_zero = builder.icmp_signed("==", value, ir.Constant(vector, [1 << (width - 1)] * MANY))
        step.store(builder.select(builder.or_(passed, minus_zero), value, zero), 3, index)
        step.store(builder.bitcast(passed, ir.IntType(MANY)), 4, builder.lshr(index, LONG(3)))

    signature, generate = emitted(emit, index, x, infinity, out, mask)
    return signature, generate


@intrinsic
def keep(typing_context: Any, index: Any, mask: Any, values: Any, out: Any) -> Any:
    """Write 128 values where their bits are 1, and zero elsewhere.

    All are read before the first is written: a tenth faster where they come from memory.

    Args:
        typing_context: Numba's; callers leave it out.
        index: Of the first value, a multiple of 128.
        mask: uint8, the bits of all values.
        values: Bits of the values: uint32, or uint16 for the half types.
        out: As values.
    """

    def emit(step: Step, index: Any) -> None:
        builder, vector = step.builder, ir.VectorType(ir.IntType(signature.args[2].dtype.bitwidth), MANY)
        places = [builder.add(index, LONG(first)) for first in range(0, AT_ONCE, MANY)]
        words = [step.load(1, builder.lshr(place, LONG(3)), ir.IntType(MANY)) for place in places]
        read = [step.load(2, place, vector) for place in places]
        for place, word, value in zip(places, words, read, strict=True):
            bits = builder.bitcast(word, ir.VectorType(ir.IntType(1), MANY))
            step.store(builder.select(bits, value, ir.Constant(vector, [0] * MANY)), 3, place)

    signature, generate = emitted(emit, index, mask, values, out)
    return signature, generate
