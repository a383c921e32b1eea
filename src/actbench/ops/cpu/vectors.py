"""LLVM vectors, for Numba kernels where LLVM's own vectoriser finds nothing half as fast.

LLVM splits a vector into what the processor has, so the same code runs everywhere. A comparison gives one bit a lane,
and these bits can be read as an integer. The machine must be little-endian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

BYTE, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()

MANY = 32
"""Values of a step in most kernels."""

VALUES = ir.VectorType(FLOAT, MANY)

TABLE = 8
"""Entries of the largest table that AVX2 permutes."""


class Step:
    """Emits the instructions of one step, from Numba's context and argument types, and LLVM's builder and values."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> None:
        self._context, self.builder, self._signature, self._arguments = context, builder, signature, arguments

    def argument(self, number: int, kind: ir.Type) -> Any:
        """Return an integer argument, cut to the bits of ``kind``."""
        return self.builder.trunc(self._arguments[number], kind)

    def place(self, argument: int, index: Any, element: ir.Type) -> Any:
        """Return the address of an element of an array, as a pointer to ``element``."""
        array = self._context.make_array(self._signature.args[argument])(
            self._context, self.builder, self._arguments[argument]
        )
        return self.builder.bitcast(self.builder.gep(array.data, [index]), element.as_pointer())

    def load(self, argument: int, index: Any, element: ir.Type) -> Any:
        """Read an element, aligned or not."""
        return self.builder.load(self.place(argument, index, element), align=1)

    def store(self, value: Any, argument: int, index: Any) -> None:
        """Write a value, aligned or not."""
        self.builder.store(value, self.place(argument, index, value.type), align=1)

    def entries(self, argument: int) -> list[Any]:
        """Return the entries of a tuple."""
        count = self._signature.args[argument].count
        return [self.builder.extract_value(self._arguments[argument], entry) for entry in range(count)]

    def spread(self, value: Any, lanes: int) -> Any:
        """Return a vector with a value in all of its lanes."""
        vector = ir.VectorType(value.type, lanes)
        single = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT(0))
        return self.builder.shuffle_vector(
            single, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(INT, lanes), [0] * lanes)
        )

    def looked_up(self, codes: Any, entries: Sequence[Any]) -> Any:
        """Return, in each lane, the entry whose number is the lane's code.

        LLVM has no such instruction, but turns eight of these extractions into one permutation if the processor has it.
        """
        parts = []
        for first in range(0, codes.type.count, TABLE):
            numbers = [self.builder.extract_element(codes, INT(first + lane)) for lane in range(TABLE)]
            table = self.gathered([entries[entry % len(entries)] for entry in range(TABLE)])
            parts.append(self.gathered([self.builder.extract_element(table, number) for number in numbers]))
        lanes = ir.Constant(ir.VectorType(INT, codes.type.count), list(range(codes.type.count)))
        return self.builder.shuffle_vector(*parts, lanes)

    def gathered(self, values: Sequence[Any]) -> Any:
        """Return a vector of these values."""
        vector = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
        for lane, value in enumerate(values):
            vector = self.builder.insert_element(vector, value, INT(lane))
        return vector

    def chosen(self, bits: Sequence[Any], entries: Sequence[Any]) -> Any:
        """Return, in each lane, the entry whose number the lane's bits are, lowest first."""
        for bit in bits:
            pairs = zip(entries[1::2], entries[::2], strict=True)
            entries = [self.builder.select(bit, odd, even) for odd, even in pairs]
        return entries[0]

    def every(self, like: Any, value: int) -> Any:
        """Return a vector like another, with a constant in all of its lanes."""
        return ir.Constant(like.type, [value] * like.type.count)


def emitted(emit: Callable[[Step, Any], None], index: Any, *arrays: Any) -> Any:
    """Return signature and code generator of an intrinsic that takes an index and arrays, and returns nothing."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = context.cast(builder, values[0], signature.args[0], types.int64)
        emit(Step(context, builder, signature, values), place)
        return context.get_dummy_value()

    return types.void(index, *arrays), generate
