"""Steps on many elements at once, written as LLVM's vectors, where its own vectoriser finds nothing half as fast.

LLVM splits a vector into what the processor has, so the same code runs everywhere. A comparison gives one bit a lane,
and these bits, read as an integer, are 1-bit codes as they are packed. Counts are multiples of the number of lanes;
callers take what is left over one by one. As for packing, the machine must be little-endian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from actbench.ops.cpu.compiled import intrinsic

_BYTE, _INT, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()

MANY, SOME = 32, 16
"""Lanes of a step of encoding and of a step of decoding."""

_TABLE = 8  # entries of the largest table that AVX2 permutes


class _Step:
    """The instructions of one step.

    Args:
        context: Numba's.
        builder: LLVM's.
        signature: Types of the arguments.
        arguments: Their values.
    """

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> None:
        self._context, self.builder, self._signature, self._arguments = context, builder, signature, arguments

    def argument(self, number: int, kind: ir.Type) -> Any:
        """Return an integer argument in no more bits than it has."""
        return self.builder.trunc(self._arguments[number], kind)

    def place(self, argument: int, index: Any, element: ir.Type) -> Any:
        """Return the address of an element of an array, as one of ``element``s."""
        array = self._context.make_array(self._signature.args[argument])(
            self._context, self.builder, self._arguments[argument]
        )
        return self.builder.bitcast(self.builder.gep(array.data, [index]), element.as_pointer())

    def load(self, argument: int, index: Any, element: ir.Type) -> Any:
        """Read, with no demand on alignment."""
        return self.builder.load(self.place(argument, index, element), align=1)

    def store(self, value: Any, argument: int, index: Any) -> None:
        """Write, with no demand on alignment."""
        self.builder.store(value, self.place(argument, index, value.type), align=1)

    def entries(self, argument: int) -> list[Any]:
        """Return the entries of a tuple."""
        count = self._signature.args[argument].count
        return [self.builder.extract_value(self._arguments[argument], entry) for entry in range(count)]

    def spread(self, value: Any, lanes: int) -> Any:
        """Return a vector with a value in all of its lanes."""
        vector = ir.VectorType(value.type, lanes)
        single = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INT(0))
        return self.builder.shuffle_vector(
            single, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes)
        )

    def looked_up(self, codes: Any, entries: Sequence[Any]) -> Any:
        """Return, in each lane, the entry that the lane's code is the number of.

        LLVM has no such instruction, but makes one permutation of eight of these extractions, where there is one.
        """
        parts = []
        for first in range(0, codes.type.count, _TABLE):
            numbers = [self.builder.extract_element(codes, _INT(first + lane)) for lane in range(_TABLE)]
            table = self.gathered([entries[entry % len(entries)] for entry in range(_TABLE)])
            parts.append(self.gathered([self.builder.extract_element(table, number) for number in numbers]))
        lanes = ir.Constant(ir.VectorType(_INT, codes.type.count), list(range(codes.type.count)))
        return self.builder.shuffle_vector(*parts, lanes)

    def gathered(self, values: Sequence[Any]) -> Any:
        """Return a vector of these values."""
        vector = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
        for lane, value in enumerate(values):
            vector = self.builder.insert_element(vector, value, _INT(lane))
        return vector

    def chosen(self, bits: Sequence[Any], entries: Sequence[Any]) -> Any:
        """Return, in each lane, the entry that the lane's bits, lowest first, are the number of."""
        for bit in bits:
            pairs = zip(entries[1::2], entries[::2], strict=True)
            entries = [self.builder.select(bit, odd, even) for odd, even in pairs]
        return entries[0]


def _int64(value: int) -> Any:
    return ir.IntType(64)(value)


def _generated(emit: Callable[[_Step, Any], None], index: Any, *arrays: Any) -> Any:
    """Return what Numba asks of an intrinsic that takes an element's index and arrays, and returns nothing."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = context.cast(builder, values[0], signature.args[0], types.int64)
        emit(_Step(context, builder, signature, values), place)
        return context.get_dummy_value()

    return types.void(index, *arrays), generate


def _packed_codes(bits: int) -> Any:
    """Return a step that packs, for each of 32 values, how many bounds are below it."""

    def emit(step: _Step, index: Any) -> None:
        builder = step.builder
        value = step.load(1, index, ir.VectorType(_FLOAT, MANY))
        bounds = [step.spread(bound, MANY) for bound in step.entries(2)]
        found: list[Any] = []  # bits of the codes, highest first: halving among the bounds
        for bit in reversed(range(bits)):
            bound = step.chosen(found[::-1], bounds[(1 << bit) - 1 :: 2 << bit])
            found.append(builder.fcmp_ordered(">", value, bound))
        stream = builder.bitcast(found[0], ir.IntType(MANY)) if bits == 1 else _closed(step, found, bits)
        step.store(stream, 3, builder.mul(builder.lshr(index, _int64(3)), _int64(bits)))

    @intrinsic
    def encode(typing_context: Any, index: Any, values: Any, bounds: Any, packed: Any) -> Any:
        return _generated(emit, index, values, bounds, packed)

    return encode


def _closed(step: _Step, found: list[Any], bits: int) -> Any:
    """Return the bytes of 32 codes given by their bits; as in :mod:`actbench.ops.cpu.bitpack`, in registers."""
    builder, byte = step.builder, ir.VectorType(_BYTE, MANY)
    code = ir.Constant(byte, [0] * MANY)
    for bit, mask in enumerate(reversed(found)):
        code = builder.select(mask, builder.add(code, ir.Constant(byte, [1 << bit] * MANY)), code)
    eight = ir.VectorType(ir.IntType(64), MANY // 8)

    def every(word: int) -> Any:
        return ir.Constant(eight, [word] * (MANY // 8))

    words = builder.bitcast(code, eight)
    for lane, used in ((16, bits), (32, 2 * bits), (64, 4 * bits)):
        low = sum(((1 << used) - 1) << start for start in range(0, 64, lane))
        moved = builder.lshr(words, every(lane // 2 - used))
        words = builder.or_(builder.and_(words, every(low)), builder.and_(moved, every(low << used)))
    kept = [8 * word + byte for word in range(MANY // 8) for byte in range(bits)]
    stream = builder.bitcast(words, byte)
    return builder.shuffle_vector(stream, stream, ir.Constant(ir.VectorType(_INT, len(kept)), kept))


encode1, encode2, encode3, encode4 = (_packed_codes(bits) for bits in range(1, 5))
"""Pack, for 32 values from ``index`` on, how many bounds are below each; none is below NaN.

Args:
    index: Of the first value, a multiple of 32.
    values: float32.
    bounds: ``2**bits - 1`` float32 numbers, ascending.
    packed: uint8, the codes of all values.
"""


def _scaled(bits: int) -> Any:
    """Return a step that multiplies 16 values by the levels of their packed codes.

    Each lane looks at the bits of its own code in a 32-bit word; from 3 bits on, eight lanes share one.
    """
    words = 1 if bits <= 2 else 2
    second = 2 * bits - 4  # byte at which the second word starts, so that it ends with the last code
    places = [bits * lane - (8 * second if words == 2 and lane >= 8 else 0) for lane in range(SOME)]
    width = ir.IntType(8 * min(2 * bits, 4))
    lanes = ir.VectorType(_INT, SOME)

    def emit(step: _Step, index: Any) -> None:
        builder = step.builder
        byte = builder.mul(builder.lshr(index, _int64(3)), _int64(bits))
        word = step.spread(builder.zext(step.load(1, byte, width), _INT), SOME)
        if words == 2:
            after = step.spread(step.load(1, builder.add(byte, _int64(second)), width), SOME)
            halves = ir.Constant(lanes, [lane if lane < 8 else SOME + lane for lane in range(SOME)])
            word = builder.shuffle_vector(word, after, halves)
        code = builder.lshr(word, ir.Constant(lanes, places))
        entries = step.entries(2)
        low = builder.and_(code, ir.Constant(lanes, [min(1 << bits, _TABLE) - 1] * SOME))
        level = step.looked_up(low, entries[:_TABLE])
        if bits == 4:
            high = builder.and_(code, ir.Constant(lanes, [_TABLE] * SOME))
            upper = builder.icmp_unsigned("!=", high, ir.Constant(lanes, [0] * SOME))
            level = builder.select(upper, step.looked_up(low, entries[_TABLE:]), level)
        value = step.load(3, index, ir.VectorType(_FLOAT, SOME))
        step.store(builder.fmul(value, level), 4, index)

    @intrinsic
    def scale(typing_context: Any, index: Any, packed: Any, levels: Any, values: Any, out: Any) -> Any:
        return _generated(emit, index, packed, levels, values, out)

    return scale


scale1, scale2, scale3, scale4 = (_scaled(bits) for bits in range(1, 5))
"""Write, for 16 values from ``index`` on, a multiple of 16, each times the level of its code of 1 to 4 bits.

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

    def emit(step: _Step, index: Any) -> None:
        builder, width = step.builder, signature.args[1].dtype.bitwidth
        vector = ir.VectorType(ir.IntType(width), MANY)
        value, zero = step.load(1, index, vector), ir.Constant(vector, [0] * MANY)
        below_all = step.spread(step.argument(2, ir.IntType(width)), MANY)
        above = builder.icmp_signed(">", value, zero)
        passed = builder.or_(above, builder.icmp_unsigned(">", value, below_all))
        minus_zero = builder.icmp_signed("==", value, ir.Constant(vector, [1 << (width - 1)] * MANY))
        step.store(builder.select(builder.or_(passed, minus_zero), value, zero), 3, index)
        step.store(builder.bitcast(passed, ir.IntType(MANY)), 4, builder.lshr(index, _int64(3)))

    signature, generate = _generated(emit, index, x, infinity, out, mask)
    return signature, generate


@intrinsic
def keep(typing_context: Any, index: Any, mask: Any, values: Any, out: Any) -> Any:
    """Write 32 values where their bits are 1, and zero elsewhere.

    Args:
        typing_context: Numba's; callers leave it out.
        index: Of the first value, a multiple of 32.
        mask: uint8, the bits of all values.
        values: Bits of the values: uint32, or uint16 for the half types.
        out: As values.
    """

    def emit(step: _Step, index: Any) -> None:
        builder, vector = step.builder, ir.VectorType(ir.IntType(signature.args[2].dtype.bitwidth), MANY)
        word = step.load(1, builder.lshr(index, _int64(3)), ir.IntType(MANY))
        bits = builder.bitcast(word, ir.VectorType(ir.IntType(1), MANY))
        step.store(builder.select(bits, step.load(2, index, vector), ir.Constant(vector, [0] * MANY)), 3, index)

    signature, generate = _generated(emit, index, mask, values, out)
    return signature, generate
