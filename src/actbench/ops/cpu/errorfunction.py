"""GELU on vectors, with the bits that torch has where oneDNN computes it with AVX-512.

The error function is computed there piece by piece: ``erf(a / sqrt(2))`` for a >= 0 is a polynomial of degree 5 in a,
another one for each quarter of a power of two, and 1 where float32 holds no other number. Which piece it is stands in
the bits of a, exponent and first two digits, counted from just above 1/8; below that the first piece goes on.
``GELU(x) = x (1 + sign(x) erf) / 2``. For an infinity that is NaN, as in torch there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from actbench.ops.cpu.compiled import intrinsic
from actbench.ops.cpu.erfpieces import PIECES
from actbench.ops.cpu.lanes import MANY, VALUES, store_codes
from actbench.ops.cpu.vectors import INT, Step, emitted

_HALF = MANY // 2
_WORDS = ir.VectorType(INT, _HALF)
_VALUES = ir.VectorType(VALUES.element, _HALF)

_FIRST = 0x3E000001  # bits of the first number of piece 0
_DIGITS = 21  # bits that do not tell the piece
_SIGN = 0x80000000
_LAST = len(PIECES) - 1  # the piece of infinities and NaN
_ONE = _LAST - 1  # the piece that is 1
_ONE_ABOVE = float(np.uint32(0x40B15CEE).view(np.float32))
_POWERS = [(*of_pieces, *[0.0] * (MANY - len(PIECES))) for of_pieces in zip(*PIECES, strict=True)]


def _gelu(step: Step, x: Any) -> Any:
    """Return GELU of 32 lanes."""
    builder = step.builder
    halves = []
    for first in (0, _HALF):
        lanes = ir.Constant(_WORDS, list(range(first, first + _HALF)))
        halves.append(_gelu_of_half(step, builder.shuffle_vector(x, x, lanes)))
    return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(INT, MANY), list(range(MANY))))


def _gelu_of_half(step: Step, x: Any) -> Any:
    builder = step.builder
    bits = builder.bitcast(x, _WORDS)
    sign = builder.and_(bits, step.every(bits, _SIGN))
    positive = builder.xor(bits, sign)
    erf = builder.bitcast(builder.xor(_erf(step, positive), sign), _VALUES)
    product = builder.fmul(x, builder.fadd(erf, step.every(x, 1.0)))
    return builder.fmul(product, step.every(x, 0.5))


def _erf(step: Step, bits: Any) -> Any:
    """Return the bits of ``erf(a / sqrt(2))``, given those of a, which is positive."""
    builder = step.builder
    a = builder.bitcast(bits, _VALUES)
    piece = builder.ashr(builder.sub(bits, step.every(bits, _FIRST)), step.every(bits, _DIGITS))
    piece = _between(step, piece, 0, _LAST)
    above = builder.fcmp_ordered(">", a, step.every(a, _ONE_ABOVE))
    piece = builder.select(above, step.every(bits, _ONE), piece)
    sum_ = step.permuted(piece, _POWERS[-1])
    for coefficients in _POWERS[-2::-1]:
        sum_ = step.fused(sum_, a, step.permuted(piece, coefficients))
    return builder.bitcast(sum_, _WORDS)


def _between(step: Step, value: Any, least: int, most: int) -> Any:
    builder, low, high = step.builder, step.every(value, least), step.every(value, most)
    value = builder.select(builder.icmp_signed("<", value, low), low, value)
    return builder.select(builder.icmp_signed(">", value, high), high, value)


@intrinsic
def gelu(typing_context: Any, index: Any, x: Any, out: Any) -> Any:
    """Write GELU of 32 values; arguments as those of :func:`actbench.ops.cpu.exponential.silu`."""

    def emit(step: Step, place: Any) -> None:
        step.store(_gelu(step, step.load(1, place, VALUES)), 2, place)

    return emitted(emit, index, x, out)


@intrinsic
def encoded_gelu(typing_context: Any, index: Any, x: Any, bounds: Any, out: Any, packed: Any) -> Any:
    """Write GELU of 32 values and their codes; arguments as :func:`actbench.ops.cpu.exponential.encoded_silu`'s."""

    def emit(step: Step, place: Any) -> None:
        value = step.load(1, place, VALUES)
        step.store(_gelu(step, value), 3, place)
        store_codes(step, value, place, 2, 4)

    return emitted(emit, index, x, bounds, out, packed)
