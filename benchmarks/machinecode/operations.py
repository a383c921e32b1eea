"""What each instruction does to a warp, by name: integers, floats, pairs of half types, predicates, memory, flow.

The instructions are described, in one line each, in NVIDIA's CUDA Binary Utilities; what their operands and marks mean
in detail was found by running kernels whose results are known.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

from machinecode.program import ZERO, Instruction, Operand

if TYPE_CHECKING:
    from machinecode.warp import Warp

Lanes = np.ndarray[Any, Any]


class Flow(Enum):
    """What an instruction says of the flow; :class:`machinecode.warp.Warp` does it."""

    JUMP = auto()
    RETURN = auto()
    GATHER = auto()
    """Lanes that part from here wait for one another at a WAIT for the same barrier."""
    WAIT = auto()
    BREAK = auto()
    """These lanes will not come to the barrier."""
    EXIT = auto()
    BLOCK = auto()
    """A barrier of all warps."""


Operation = Callable[["Warp", Instruction], Flow | None]
OPERATIONS: dict[str, Operation] = {}


def operation(*names: str) -> Callable[[Operation], Operation]:
    """Register a function under the names of instructions."""

    def register(function: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


def u64(value: int) -> np.uint64:
    """Return a 64-bit word."""
    return np.uint64(value % 2**64)


def split(i: Instruction) -> tuple[list[Operand], list[Operand], list[Operand]]:
    """Return the predicates that are written beside the result, the plain inputs, and the predicates that are read."""
    rest = list(i.operands[1:])
    written = [rest.pop(0) for _ in range(len(rest)) if rest and rest[0].kind == "predicate"]
    return written, [o for o in rest if o.kind != "predicate"], [o for o in rest if o.kind == "predicate"]


# ---- Integers


def addend(w: Warp, o: Operand, carries: bool) -> Lanes:
    """Return an input of a sum with 33 bits or more: -x is ~x + 1, and the 1 may carry."""
    value = w.bits(o, ones=True).astype(np.uint64)
    return value + u64(1) if o.negative and not carries else value


def add(w: Warp, i: Instruction, parts: list[Lanes], written: list[Operand], read: list[Operand]) -> None:
    """Write the sum of parts, of the carries that are read, and the carry of the sum."""
    total = sum(parts, np.zeros(32, np.uint64))
    if "X" in i.marks:
        total = sum((w.truth(o).astype(np.uint64) for o in read), total)
    for number, o in enumerate(written):
        w.put_truth(o, total >> u64(32) > u64(number))
    w.put(i.operands[0], total & u64(0xFFFFFFFF))


@operation("IADD3", "IADD", "VIADD")
def integer_sum(w: Warp, i: Instruction) -> None:
    """Add two or three numbers, or the halves of two words apart (16x2)."""
    written, inputs, read = split(i)
    if "16x2" in i.marks:
        parts = [np.array(w.bits(o)).view(np.uint16) for o in inputs]
        w.put(i.operands[0], sum(parts[1:], parts[0]).view(np.uint32))
    elif "64" in i.marks:
        w.put_wide(i.operands[0], sum((w.wide(o) for o in inputs), np.zeros(32, np.uint64)))
    else:
        add(w, i, [addend(w, o, "X" in i.marks) for o in inputs], written, read)


@operation("IMAD")
def multiply_add(w: Warp, i: Instruction) -> None:
    """Multiply two numbers and add a third: 32 bits, the product's upper ones (HI), or 64 (WIDE)."""
    written, (a, b, c), read = split(i)
    if not i.marks & {"WIDE", "HI"}:
        add(
            w,
            i,
            [w.bits(a).astype(np.uint64) * w.bits(b) & u64(0xFFFFFFFF), addend(w, c, "X" in i.marks)],
            written,
            read,
        )
        return
    kind = np.uint32 if "U32" in i.marks else np.int32
    product = (w.bits(a).view(kind).astype(np.int64) * w.bits(b).view(kind)).view(np.uint64)
    if kind is np.uint32:
        product = w.bits(a).astype(np.uint64) * w.bits(b).astype(np.uint64)
    total = product + w.wide(c)
    if "X" in i.marks:
        total += sum((w.truth(o).astype(np.uint64) for o in read), np.zeros(32, np.uint64))
    for o in written:
        w.put_truth(o, total < product)
    if "WIDE" in i.marks:
        w.put_wide(i.operands[0], total)
    else:
        w.put(i.operands[0], total >> u64(32))


@operation("LEA")
def shifted_sum(w: Warp, i: Instruction) -> None:
    """Add a number shifted to the left, or the upper word of a shifted pair (HI)."""
    written, inputs, read = split(i)
    a, b, *above, places = inputs
    if "SX32" in i.marks:
        pair = w.bits(a).view(np.int32).astype(np.int64).view(np.uint64)
    else:
        upper = w.bits(above[0]).astype(np.uint64) if above else u64(0)
        pair = w.bits(a).astype(np.uint64) | upper << u64(32)
    shifted = pair << u64(places.index & 31)
    part = shifted >> u64(32) if "HI" in i.marks else shifted & u64(0xFFFFFFFF)
    add(w, i, [part, addend(w, b, "X" in i.marks)], written, read)


@operation("SHF")
def funnel_shift(w: Warp, i: Instruction) -> None:
    """Shift a pair of words, or one of them, by places that may be more than it has."""
    low, places, high = i.operands[1:4]
    pair = w.bits(low).astype(np.uint64) | w.bits(high).astype(np.uint64) << u64(32)
    by, both = w.bits(places).astype(np.uint64), bool(i.marks & {"U64", "S64"})
    last = u64(63 if both else 31)
    by = by & last if "W" in i.marks else np.minimum(by, last + u64(1))
    signed = bool(i.marks & {"S32", "S64"})
    if "L" in i.marks:
        shifted = np.where(by > u64(63), u64(0), pair << (by & u64(63)))
        shifted = shifted if both or "HI" in i.marks else shifted & u64(0xFFFFFFFF)
    elif both or "HI" not in i.marks:
        moved = (pair.view(np.int64) >> by.astype(np.int64)).view(np.uint64) if signed else pair >> (by & u64(63))
        shifted = np.where(by > u64(63), u64(0), moved)
    else:  # the upper word alone
        upper = (pair >> u64(32)).astype(np.uint32)
        wide = upper.view(np.int32).astype(np.int64).view(np.uint64) if signed else upper.astype(np.uint64)
        shifted = (wide.view(np.int64) >> by.astype(np.int64)).view(np.uint64) << u64(32)
    w.put(i.operands[0], (shifted >> u64(32)) if "HI" in i.marks else shifted & u64(0xFFFFFFFF))


def looked_up(table: int, a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Return a function of three bits at each place: bit 4a + 2b + c of the table."""
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


@operation("LOP3")
def logic(w: Warp, i: Instruction) -> None:
    """Combine three words by a table; a predicate beside the result says whether it is other than zero."""
    first = int(i.operands[0].kind == "predicate")
    a, b, c, table = i.operands[first + 1 : first + 5]
    value = looked_up(table.index, w.bits(a), w.bits(b), w.bits(c))
    if first:
        w.put_truth(i.operands[0], (value != 0) | w.truth(i.operands[first + 5]))
    w.put(i.operands[first], value)


@operation("PRMT")
def permute(w: Warp, i: Instruction) -> None:
    """Choose four of eight bytes; the fourth bit of a choice repeats the byte's sign."""
    low, choice, high = (w.bits(o).astype(np.uint64) for o in i.operands[1:4])
    pair, result = low | high << u64(32), np.zeros(32, np.uint64)
    for place in range(4):
        chosen = choice >> u64(4 * place) & u64(15)
        byte = pair >> (chosen & u64(7)) * u64(8) & u64(255)
        byte = np.where(chosen & u64(8), (byte >> u64(7)) * u64(255), byte)
        result |= byte << u64(8 * place)
    w.put(i.operands[0], result)


@operation("MOV", "CS2R", "R2UR")
def move(w: Warp, i: Instruction) -> None:
    """Copy a word or a pair; to a uniform register from the first lane that is here."""
    to, source = next(o for o in i.operands if o.kind == "register"), i.operands[-1]
    if source.kind == "name":  # CS2R reads a clock, or SRZ
        source = Operand("number")
    if i.name == "R2UR":
        w.put(to, np.full(32, w.bits(source)[np.argmax(w.here)]))
    elif "64" in i.marks or (i.name == "CS2R" and "32" not in i.marks):
        w.put_wide(to, w.wide(source))
    else:
        w.put(to, w.bits(source))


@operation("SEL", "FSEL")
def select(w: Warp, i: Instruction) -> None:
    """Take one of two values, by a predicate."""
    to, a, b, first = i.operands
    if i.name == "FSEL":
        w.put_float(to, np.where(w.truth(first), w.float(a), w.float(b)))
    elif "64" in i.marks:
        w.put_wide(to, np.where(w.truth(first), w.wide(a), w.wide(b)))
    else:
        w.put(to, np.where(w.truth(first), w.bits(a), w.bits(b)))


@operation("IMNMX", "VIMNMX", "VIMNMX3", "VIADDMNMX")
def least_or_greatest(w: Warp, i: Instruction) -> None:
    """Take the least of some integers, or the greatest where the last predicate does not hold."""
    to, *inputs = [o for o in i.operands if o.kind != "predicate"]
    if i.marks & {"S64", "U64"}:  # two predicates are written before the result, and two are read
        numbers = [w.wide(o).view(np.int64 if "S64" in i.marks else np.uint64) for o in inputs]
        least = w.truth(i.operands[-2])
        w.put_wide(to, np.where(least, np.minimum(*numbers), np.maximum(*numbers)).view(np.uint64))
        return
    kind = np.dtype(
        np.int16
        if "S16x2" in i.marks
        else np.uint16
        if "U16x2" in i.marks
        else np.uint32
        if "U32" in i.marks
        else np.int32
    )
    numbers = [np.ascontiguousarray(w.bits(o)).view(kind).reshape(32, -1) for o in inputs]
    if i.name == "VIADDMNMX":
        numbers = [numbers[0] + numbers[1], numbers[2]]
    least = w.truth(i.operands[-1])[:, None]
    result = numbers[0]
    for each in numbers[1:]:
        result = np.where(least, np.minimum(result, each), np.maximum(result, each))
    result = np.maximum(result, 0) if "RELU" in i.marks else result
    w.put(to, np.ascontiguousarray(result.astype(kind)).view(np.uint32)[:, 0])


@operation("IABS")
def magnitude(w: Warp, i: Instruction) -> None:
    """Take the absolute value."""
    w.put(i.operands[0], np.abs(w.bits(i.operands[1]).view(np.int32)).view(np.uint32))


@operation("POPC", "FLO", "BREV")
def count_bits(w: Warp, i: Instruction) -> None:
    """Count the bits that are 1, find the highest one (-1 of zero), or reverse all."""
    of = {
        "POPC": int.bit_count,
        "FLO": lambda x: (x.bit_length() - 1) % 2**32,
        "BREV": lambda x: int(f"{x:032b}"[::-1], 2),
    }
    found = np.array([of[i.name](int(x)) for x in w.bits(i.operands[1])], np.uint32)
    w.put(i.operands[0], np.where(found < 32, 31 - found, found) if "SH" in i.marks else found)


# ---- Predicates

COMPARISONS: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip
UNORDERED = tuple(f"{name}U" for name in COMPARISONS)


def compare(i: Instruction, a: Lanes, b: Lanes) -> Lanes:
    """Compare; NaN makes true what ends with U, and false what does not, NE among them."""
    name = i.mark(*UNORDERED, *COMPARISONS, "NUM", "NAN")
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(a.shape, bool)
    if name in ("NUM", "NAN"):
        return unordered == (name == "NAN")
    holds = COMPARISONS[name[:2]](a, b)
    return holds | unordered if name in UNORDERED else holds & ~unordered


def combine(w: Warp, i: Instruction, holds: Lanes, other: Operand) -> None:
    """Write a comparison and its opposite, each combined with another predicate."""
    with_other = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}[i.mark("AND", "OR", "XOR")]
    value, opposite = with_other(holds, w.truth(other)), with_other(~holds, w.truth(other))
    w.put_truth(i.operands[0], value)
    w.put_truth(i.operands[1], opposite)


@operation("ISETP")
def compare_integers(w: Warp, i: Instruction) -> None:
    """Compare words or pairs; the upper words of pairs (EX) after the lower ones."""
    a, b, other, *lower = i.operands[2:]
    if i.marks & {"S64", "U64"}:
        kind = np.int64 if "S64" in i.marks else np.uint64
        combine(w, i, compare(i, w.wide(a).view(kind), w.wide(b).view(kind)), other)
        return
    kind = np.uint32 if "U32" in i.marks else np.int32
    x, y = (np.ascontiguousarray(w.bits(o)).view(kind) for o in (a, b))
    holds = compare(i, x, y)
    if "EX" in i.marks:
        holds = np.where(x == y, w.truth(lower[0]), holds)
    combine(w, i, holds, other)


@operation("FSETP")
def compare_floats(w: Warp, i: Instruction) -> None:
    """Compare float32."""
    a, b, other = i.operands[2:5]
    combine(w, i, compare(i, w.float(a, "FTZ" in i.marks), w.float(b, "FTZ" in i.marks)), other)


@operation("PLOP3")
def predicate_logic(w: Warp, i: Instruction) -> None:
    """Combine three predicates by two tables."""
    a, b, c = (w.truth(o) for o in i.operands[2:5])
    tables = [o.index for o in i.operands[5:]]
    results = [looked_up(table, a, b, c) for table in tables]
    for o, value in zip(i.operands, results, strict=False):
        w.put_truth(o, value)


@operation("P2R")
def predicates_to_register(w: Warp, i: Instruction) -> None:
    """Write predicates as the low bits of a word."""
    kept, mask = w.bits(i.operands[2]), np.uint32(i.operands[3].index)
    bits = sum((w.predicates[k].astype(np.uint32) << np.uint32(k) for k in range(7)), np.zeros(32, np.uint32))
    w.put(i.operands[0], (kept & ~mask) | (bits & mask))


@operation("R2P")
def register_to_predicates(w: Warp, i: Instruction) -> None:
    """Read predicates from the bits of a byte."""
    source, mask = i.operands[1:3]
    byte = w.bits(source) >> np.uint32(8 * int(source.part[1:] or 0))
    for k in range(7):
        if mask.index >> k & 1:
            w.put_truth(Operand("predicate", k), (byte >> np.uint32(k) & np.uint32(1)) != 0)


@operation("VOTE")
def vote(w: Warp, i: Instruction) -> None:
    """Write whether a predicate holds in all, or any, of the lanes that are here, and in which."""
    holds = w.truth(i.operands[-1]) & w.here
    told = (holds == w.here).all() if "ALL" in i.marks else holds.any()
    for o in i.operands[:-1]:
        if o.kind == "predicate":
            w.put_truth(o, np.full(32, told))
        else:
            w.put(o, np.full(32, np.packbits(holds, bitorder="little").view(np.uint32)[0]))


@operation("REDUX")
def reduce(w: Warp, i: Instruction) -> None:
    """Combine a word of all lanes that are here."""
    kind = np.int32 if "S32" in i.marks else np.uint32
    whole = {
        "SUM": np.add,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "AND": np.bitwise_and,
        "OR": np.bitwise_or,
        "XOR": np.bitwise_xor,
    }
    with np.errstate(over="ignore"):
        found = whole[i.mark(*whole, default="SUM")].reduce(w.bits(i.operands[1]).view(kind)[w.here])
    w.put(i.operands[0], np.full(32, found, kind).view(np.uint32))


# ---- Floats: computed with 64 bits of mantissa and rounded once


def rounded(i: Instruction, exact: Lanes) -> Lanes:
    """Return float32: the nearest, or that below (RM), above (RP) or towards zero (RZ)."""
    nearest = exact.astype(np.float32)
    if not i.marks & {"RM", "RP", "RZ"}:
        return nearest
    down = (exact > 0) | ("RM" in i.marks) if "RP" not in i.marks else np.zeros(32, bool)
    wrong = np.where(down, nearest > exact, nearest < exact)
    return np.where(wrong, np.nextafter(nearest, np.where(down, -np.inf, np.inf).astype(np.float32)), nearest)


@operation("FADD", "FMUL", "FFMA")
def float_arithmetic(w: Warp, i: Instruction) -> None:
    """Add, multiply, or both with one rounding."""
    flush = "FTZ" in i.marks
    a, b, *c = (w.float(o, flush).astype(np.longdouble) for o in i.operands[1:])
    exact = a + b if i.name == "FADD" else a * b if i.name == "FMUL" else a * b + c[0]
    value = rounded(i, exact)
    if "SAT" in i.marks:
        value = np.where(np.isnan(value), np.float32(0), np.clip(value, 0, 1))
    value = np.where(np.isnan(value), np.array(0x7FFFFFFF, np.uint32).view(np.float32), value)
    w.put_float(i.operands[0], value, flush)


@operation("FMNMX")
def least_or_greatest_float(w: Warp, i: Instruction) -> None:
    """Take the lesser of two floats, or the greater; NaN is the other one's fault, or stays (NAN)."""
    a, b, least = i.operands[1:4]
    low, high = (np.minimum, np.maximum) if "NAN" in i.marks else (np.fmin, np.fmax)
    x, y = w.float(a, "FTZ" in i.marks), w.float(b, "FTZ" in i.marks)
    w.put_float(i.operands[0], np.where(w.truth(least), low(x, y), high(x, y)))


@operation("FCHK")
def division_is_special(w: Warp, i: Instruction) -> None:
    """Tell whether a quotient needs the slow way: ends of the range, and what is no number."""
    a, b = ((w.bits(o) >> np.uint32(23) & np.uint32(255)).astype(np.int64) for o in i.operands[1:3])
    zero = w.float(i.operands[1]) == 0
    odd = (a == 255) | (b == 255) | (b == 0) | (b > 252) | (a - b > 125)
    w.put_truth(i.operands[0], odd | (~zero & ((a < 25) | (a - b < -125))))


@operation("MUFU")
def special_function(w: Warp, i: Instruction) -> None:
    """Compute what the device approximates; here the nearest float."""
    of = {
        "RCP": lambda x: 1 / x,
        "RSQ": lambda x: 1 / np.sqrt(x),
        "EX2": np.exp2,
        "LG2": np.log2,
        "SQRT": np.sqrt,
        "TANH": np.tanh,
    }
    w.put_float(i.operands[0], of[i.mark(*of)](w.float(i.operands[1], flush=True).astype(np.float64)), flush=True)


@operation("F2I")
def float_to_integer(w: Warp, i: Instruction) -> None:
    """Round to an integer, of the nearest of the type where it has none; NaN is 0."""
    away = {"TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil}
    x = np.nan_to_num(away.get(i.mark(*away), np.rint)(w.float(i.operands[1], "FTZ" in i.marks).astype(np.longdouble)))
    if i.marks & {"U64", "S64"}:
        w.put_wide(
            i.operands[0],
            np.clip(x, 0, 2.0**64 - 1).astype(np.uint64) if "U64" in i.marks else x.astype(np.int64).view(np.uint64),
        )
    elif "U32" in i.marks:
        w.put(i.operands[0], np.clip(x, 0, 2**32 - 1).astype(np.uint64))
    else:
        w.put(i.operands[0], np.clip(x, -(2**31), 2**31 - 1).astype(np.int64).astype(np.uint64) & u64(0xFFFFFFFF))


@operation("I2F", "I2FP")
def integer_to_float(w: Warp, i: Instruction) -> None:
    """Write an integer as a float."""
    source = i.operands[1]
    if i.marks & {"U64", "S64"}:
        value = w.wide(source).view(np.int64 if "S64" in i.marks else np.uint64)
    else:
        value = w.bits(source) if "U32" in i.marks else w.bits(source).view(np.int32)
    w.put_float(i.operands[0], rounded(i, value.astype(np.longdouble)))


# ---- Pairs of half types: (2, lanes) float32, the low half first


def is_bfloat(i: Instruction) -> bool:
    """Tell which of the half types an instruction is for."""
    return bool(i.marks & {"BF16", "BF16_V2"})


def halves(w: Warp, o: Operand, bfloat: bool) -> Lanes:
    """Return the two numbers of a word, or one of them twice."""
    if o.kind == "number":
        return np.full((2, 32), o.number, np.float32)
    word = w.bits(Operand(o.kind, o.index, o.base))
    two = np.stack([word & np.uint32(0xFFFF), word >> np.uint32(16)])
    values = (
        (two << np.uint32(16)).view(np.float32) if bfloat else two.astype(np.uint16).view(np.float16).astype(np.float32)
    )
    if o.part in ("H0_H0", "H1_H1"):
        values = values[[int(o.part[1])] * 2]
    values = np.abs(values) if o.absolute else values
    return -values if o.negative else values


def word_of(two: Lanes, bfloat: bool) -> Lanes:
    """Round two numbers to the nearest of the type; NaN is 0x7fff."""
    if bfloat:
        bits = np.ascontiguousarray(two.astype(np.float32)).view(np.uint32)
        bits = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    else:
        bits = two.astype(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)
    bits = np.where(np.isnan(two), np.uint32(0x7FFF), bits)
    return bits[0] | bits[1] << np.uint32(16)


@operation("F2FP")
def narrow(w: Warp, i: Instruction) -> None:
    """Round two floats to one word."""
    high, low = (w.float(o) for o in i.operands[1:3])
    w.put(i.operands[0], word_of(np.stack([low, high]), is_bfloat(i)))


@operation("HADD2", "HMUL2", "HFMA2")
def half_arithmetic(w: Warp, i: Instruction) -> None:
    """Compute with two numbers at once; HADD2.F32 adds one of each word, and HFMA2 of zeros moves two numbers."""
    bfloat, inputs = is_bfloat(i), i.operands[1:]
    if i.name == "HADD2" and "F32" in i.marks:  # widens the one that is beside -0, which stands before it or behind it
        first, second = (halves(w, o, bfloat)[int(o.part == "H1_H1")] for o in inputs)
        w.put_float(i.operands[0], first + second)
        return
    a, b = (halves(w, o, bfloat).astype(np.float64) for o in inputs[:2])
    if i.name == "HFMA2":
        pair = [halves(w, o, bfloat) for o in inputs[2:]]
        b = a * b + (np.stack([pair[1][0], pair[0][0]]) if len(pair) == 2 else pair[0])
    else:
        b = a + b if i.name == "HADD2" else a * b
    w.put(i.operands[0], word_of(b, bfloat))


@operation("HMNMX2", "VHMNMX")
def least_or_greatest_half(w: Warp, i: Instruction) -> None:
    """Take the least or greatest of two or three numbers, twice."""
    *inputs, least = i.operands[1:]
    low, high = (np.minimum, np.maximum) if "NAN" in i.marks else (np.fmin, np.fmax)
    result = halves(w, inputs[0], is_bfloat(i))
    for o in inputs[1:]:
        other = halves(w, o, is_bfloat(i))
        result = np.where(w.truth(least), low(result, other), high(result, other))
    w.put(i.operands[0], word_of(result, is_bfloat(i)))


@operation("HSET2")
def compare_halves(w: Warp, i: Instruction) -> None:
    """Compare two numbers with two: all ones, or 1.0 (BF), where it holds."""
    a, b = (halves(w, o, is_bfloat(i)) for o in i.operands[1:3])
    holds = compare(i, a, b) & w.truth(i.operands[3])
    ones = np.where(holds, np.uint32(0xFFFF), np.uint32(0))
    w.put(
        i.operands[0],
        word_of(holds.astype(np.float32), is_bfloat(i)) if "BF" in i.marks else ones[0] | ones[1] << np.uint32(16),
    )


@operation("HSETP2")
def compare_halves_to_predicates(w: Warp, i: Instruction) -> None:
    """Compare two numbers with two: the first predicate is that of the low halves, the second that of the high ones."""
    if "H_AND" in i.marks:
        raise NotImplementedError("one predicate for both halves")
    a, b = (halves(w, o, is_bfloat(i)) for o in i.operands[2:4])
    with_other = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}[i.mark("AND", "OR", "XOR")]
    for to, holds in zip(i.operands[:2], compare(i, a, b), strict=True):
        w.put_truth(to, with_other(holds, w.truth(i.operands[4])))


# ---- Memory and other lanes

SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@operation("LDC")
def load_constant(w: Warp, i: Instruction) -> None:
    """Read the constant bank, which has the arguments: 4, 8 or 16 bytes."""
    to, source = i.operands
    for k in range(SIZES.get(i.mark(*SIZES), 4) // 4):
        w.put(Operand("register", to.index + k), w.bits(Operand("constant", source.index + 4 * k, source.base)))


@operation("LDG", "LDS")
def load(w: Warp, i: Instruction) -> None:
    """Read 1 to 16 bytes a lane."""
    to, place = i.operands[0], next(o for o in i.operands if o.kind == "memory")
    mark = i.mark(*SIZES)
    memory, size = (w.block.shared if i.name == "LDS" else w.block.memory), SIZES.get(mark, 4)
    data = memory.load(w.address(place, i.name == "LDG")[w.on], size)
    if size < 4:
        kind = np.dtype(f"{'i' if mark[0] == 'S' else 'u'}{size}")
        words = np.ascontiguousarray(data).view(kind).astype(np.int64).astype(np.uint32)
    else:
        words = np.ascontiguousarray(data).view(np.uint32)
    for k in range(words.shape[1]):
        value = np.zeros(32, np.uint32)
        value[w.on] = words[:, k]
        w.put(Operand("register", to.index + k), value)


@operation("STG", "STS")
def store(w: Warp, i: Instruction) -> None:
    """Write 1 to 16 bytes a lane."""
    place, source = i.operands[:2]
    memory, size = (w.block.shared if i.name == "STS" else w.block.memory), SIZES.get(i.mark(*SIZES), 4)
    zero = source.index in (255, 511)
    words = [w.bits(Operand("register", source.index + (0 if zero else k))) for k in range(max(size // 4, 1))]
    data = np.ascontiguousarray(np.stack(words, 1)).view(np.uint8)[:, :size]
    memory.store(w.address(place, i.name == "STG")[w.on], data[w.on])


@operation("ATOMS")
def combine_in_shared(w: Warp, i: Instruction) -> None:
    """Set bits of words of shared memory, of which several lanes may have the same; what was there is not returned."""
    to, place, source = i.operands
    if "OR" not in i.marks or to.index != ZERO:
        raise NotImplementedError("only OR without a result")
    addresses, shared = w.address(place, pairs=False)[w.on], w.block.shared
    shared.load(addresses, 4)  # counts the turns, and whether the words may be touched
    np.bitwise_or.at(shared.bytes.view(np.uint32), (addresses - shared.base) // 4, w.bits(source)[w.on])


@operation("LDL", "STL")
def local(w: Warp, i: Instruction) -> None:
    """Read or write words of the stack, which each lane has for itself."""
    place, word = sorted(i.operands, key=lambda o: o.kind != "memory")
    first = w.address(place, pairs=False) // 4 % len(w.stack)
    for k in range(SIZES.get(i.mark(*SIZES), 4) // 4):
        at, register = (first + k, np.arange(32)), Operand("register", word.index + k)
        if i.name == "LDL":
            w.put(register, w.stack[at])
        else:
            w.stack[at] = np.where(w.on, w.bits(register), w.stack[at])


@operation("SHFL")
def shuffle(w: Warp, i: Instruction) -> None:
    """Read another lane's word."""
    inside, to, source, by, bounds = i.operands
    lanes, step, bound = np.arange(32), w.bits(by).astype(np.int64), w.bits(bounds).astype(np.int64)
    clamp, segment = bound & 31, bound >> 8 & 31
    most = lanes & segment | clamp & ~segment
    kind = i.mark("BFLY", "IDX", "UP", "DOWN")
    wanted = {"BFLY": lanes ^ step, "IDX": lanes & segment | step & ~segment, "UP": lanes - step, "DOWN": lanes + step}[
        kind
    ]
    reaches = wanted >= most if kind == "UP" else wanted <= most
    w.put_truth(inside, reaches)
    w.put(to, w.bits(source)[np.where(reaches, wanted, lanes)])


@operation("S2R")
def special_register(w: Warp, i: Instruction) -> None:
    """Read the number of the thread or lane; that of the block is 0, and so is where shared memory begins."""
    name = i.operands[1].text
    lanes = np.arange(32, dtype=np.uint32)
    if name == "SR_TID.X":
        w.put(i.operands[0], lanes + np.uint32(32 * w.index))
    elif name == "SR_LANEID":
        w.put(i.operands[0], lanes)
    elif name in ("SR_CTAID.X", "SR_CgaCtaId", "SR_SWINHI"):
        w.put(i.operands[0], np.zeros(32, np.uint32))
    else:
        raise NotImplementedError(name)


# ---- Flow


@operation("NOP", "WARPSYNC", "ENDCOLLECTIVE", "MEMBAR", "YIELD")
def nothing(w: Warp, i: Instruction) -> None:
    """Do nothing: lanes of a warp that should be together are together."""


@operation("BRA")
def branch(w: Warp, i: Instruction) -> Flow | None:
    """Jump; not where it is for lanes that did not come together (DIV)."""
    return None if "DIV" in i.marks else Flow.JUMP


def flow(kind: Flow) -> Operation:
    """Return the operation that is only flow."""
    return lambda w, i: kind


OPERATIONS |= {
    "CALL": flow(Flow.JUMP), "RET": flow(Flow.RETURN), "BSSY": flow(Flow.GATHER), "BSYNC": flow(Flow.WAIT),
    "BREAK": flow(Flow.BREAK), "EXIT": flow(Flow.EXIT), "BAR": flow(Flow.BLOCK),
}  # fmt: skip
