"""SiLU and GELU on vectors, with the bits that torch's vectors have.

**SiLU.** Torch computes exp in float32 as most vector libraries do, to within one unit in the last place: ``exp(v)`` is
``2**n * exp(r)`` with n the integer nearest to ``v / log(2)``, and with r found in two steps, since ``log(2)`` has more
digits than a float32; ``exp(r)`` is a polynomial. Its coefficients are those of SLEEF, which torch's vectors call: with
others the last bits would differ. Each step below rounds as there, so the result does; what is done there beyond the
limits of float32 is not repeated where it cannot be seen in the result.

**GELU** as oneDNN computes it with AVX-512: ``erf(a / sqrt(2))`` for a >= 0 is a polynomial of degree 5 in a, another
one for each quarter of a power of two, and 1 where float32 holds no other number. Which piece it is stands in the bits
of a, exponent and first two digits, counted from just above 1/8; below that the first piece goes on.
``GELU(x) = x (1 + sign(x) erf) / 2``. For an infinity that is NaN, as in torch there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from actbench.ops.cpu.compiled import intrinsic
from actbench.ops.cpu.vectors import INT, MANY, VALUES, Step, emitted
from actbench.ops.stepwise.cpu import store_codes

_PER_LOG2 = 1.4426950408889634
_LOG2_HIGH, _LOG2_LOW = 0.693145751953125, 1.4286068e-6  # the first has few bits: n times it is exact
_POLYNOMIAL = (1.9852762e-4, 1.3930436e-3, 8.3333608e-3, 4.1666485e-2, 0.16666667, 0.5)  # of r, but for 1 + r

_SHIFT = 1.5 * 2.0**23  # a float32 of this size has no fraction, and counts in its lowest bits
_EXPONENT = 126  # of 0.5: the float32 with this in place of the exponent, counted from zero
_FRACTION_BITS = 23
_LEAST, _MOST = -86.0, 88.9  # beyond, 1 + exp is 1 or infinite; at them, n - 1 is -125 and 127

# Six coefficients of each piece of the error function, of the power 0 first; found from torch's numbers
# (docs/decisions/0003). The last piece is that of NaN, the one before it is 1.
_PIECES = (
    (1.5188366e-08, 0.7978839, 1.0841714e-05, -0.13307738, 4.58893e-04, 0.018966828),
    (6.0441465e-08, 0.7978825, 2.896764e-05, -0.13319246, 8.250156e-04, 0.018499883),
    (1.9580071e-07, 0.7978789, 6.682378e-05, -0.13339315, 1.3578596e-03, 0.01793304),
    (5.7655126e-07, 0.79787034, 1.4431536e-04, -0.13374342, 2.1505188e-03, 0.017214557),
    (1.8136789e-06, 0.7978466, 3.2647466e-04, -0.1344436, 3.4977621e-03, 0.01617638),
    (7.1081054e-06, 0.7977628, 8.582302e-04, -0.13613439, 6.191868e-03, 0.014455351),
    (2.2010752e-05, 0.79756546, 1.9052438e-03, -0.13891616, 9.893196e-03, 0.012482236),
    (5.5225635e-05, 0.7971865, 3.6366323e-03, -0.14287555, 0.014425337, 0.010404875),
    (1.831175e-04, 0.7959481, 8.441632e-03, -0.15221408, 0.023517137, 6.857343e-03),
    (6.498413e-04, 0.7922447, 0.020222925, -0.1709968, 0.03852472, 2.0495458e-03),
    (1.7345067e-03, 0.7850465, 0.039360855, -0.19647883, 0.05551665, -2.4900034e-03),
    (3.7866202e-03, 0.7733578, 0.06602445, -0.2269277, 0.07292371, -6.475404e-03),
    (8.343051e-03, 0.7511906, 0.10923457, -0.26911446, 0.09355366, -0.010517931),
    (0.0127789555, 0.732789, 0.13979976, -0.29452354, 0.10412485, -0.012278704),
    (-3.176821e-03, 0.7846672, 0.072266184, -0.25052387, 0.089776866, -0.010405218),
    (-0.0691192, 0.9714677, -0.1396405, -0.1301916, 0.05557131, -6.5113325e-03),
    (-0.27097204, 1.4611516, -0.6155817, 0.10148359, -9.112102e-04, -9.935636e-04),
    (-0.5472661, 2.0251584, -1.0770063, 0.2905895, -0.03973237, 2.1998081e-03),
    (-0.39980435, 1.790736, -0.9281096, 0.24336384, -0.032254163, 1.72694e-03),
    (0.14787646, 1.0093725, -0.4816873, 0.11568559, -0.013974587, 6.788905e-04),
    (0.77755123, 0.23098189, -0.0961774, 0.020067886, -2.0977375e-03, 8.7863686e-05),
    (0.9794183, 0.01867352, -6.786839e-03, 1.2350094e-03, -1.12510286e-04, 4.1047288e-06),
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
)
_HALF = MANY // 2
_HALF_WORDS = ir.VectorType(INT, _HALF)
_HALF_VALUES = ir.VectorType(VALUES.element, _HALF)

_FIRST_PIECE = 0x3E000001  # bits of the first number of piece 0
_DIGITS = 21  # bits that do not tell the piece
_SIGN = 0x80000000
_LAST = len(_PIECES) - 1  # the piece of infinities and NaN
_ONE = _LAST - 1  # the piece that is 1
_ONE_ABOVE = float(np.uint32(0x40B15CEE).view(np.float32))
_POWERS = [(*of_pieces, *[0.0] * (MANY - len(_PIECES))) for of_pieces in zip(*_PIECES, strict=True)]


def _silu(step: Step, x: Any) -> Any:
    """Return ``x / (1 + exp(-x))``."""
    value = _between(step, step.builder.fneg(x), _LEAST, _MOST)
    rest, half_power = _reduced(step, value)
    half = step.builder.fmul(_exp_near_zero(step, rest), half_power)
    return step.builder.fdiv(x, _one_more_than_twice(step, half))


def _between(step: Step, value: Any, least: float, most: float) -> Any:
    """Return what is between two numbers as it is, and NaN as NaN."""
    builder, low, high = step.builder, step.every(value, least), step.every(value, most)
    value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
    return builder.select(builder.fcmp_ordered(">", value, high), high, value)


def _reduced(step: Step, value: Any) -> tuple[Any, Any]:
    """Return r and ``2**(n - 1)``: with n itself the power of a finite result may be infinite."""
    builder = step.builder
    shift = step.every(value, _SHIFT + _EXPONENT)
    shifted = builder.fadd(builder.fmul(value, step.every(value, _PER_LOG2)), shift)
    nearest = builder.fsub(shifted, shift)
    rest = step.fused(nearest, step.every(value, -_LOG2_HIGH), value)
    rest = step.fused(nearest, step.every(value, -_LOG2_LOW), rest)
    counted = builder.bitcast(shifted, ir.VectorType(INT, MANY))
    return rest, builder.bitcast(builder.shl(counted, step.every(counted, _FRACTION_BITS)), value.type)


def _exp_near_zero(step: Step, rest: Any) -> Any:
    """Return ``exp(r)`` for half of ``log(2)`` at most."""
    sum_ = step.every(rest, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        sum_ = step.fused(sum_, rest, step.every(rest, coefficient))
    beyond = step.fused(step.builder.fmul(rest, rest), sum_, rest)
    return step.builder.fadd(beyond, step.every(rest, 1.0))


def _one_more_than_twice(step: Step, value: Any) -> Any:
    """Return ``1 + 2 * value``; doubling is exact, or infinite."""
    return step.fused(value, step.every(value, 2.0), step.every(value, 1.0))


def _gelu(step: Step, x: Any) -> Any:
    """Return GELU of 32 lanes."""
    builder = step.builder
    halves = []
    for first in (0, _HALF):
        lanes = ir.Constant(_HALF_WORDS, list(range(first, first + _HALF)))
        halves.append(_gelu_of_half(step, builder.shuffle_vector(x, x, lanes)))
    return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(INT, MANY), list(range(MANY))))


def _gelu_of_half(step: Step, x: Any) -> Any:
    builder = step.builder
    bits = builder.bitcast(x, _HALF_WORDS)
    sign = builder.and_(bits, step.every(bits, _SIGN))
    positive = builder.xor(bits, sign)
    erf = builder.bitcast(builder.xor(_erf(step, positive), sign), _HALF_VALUES)
    product = builder.fmul(x, builder.fadd(erf, step.every(x, 1.0)))
    return builder.fmul(product, step.every(x, 0.5))


def _erf(step: Step, bits: Any) -> Any:
    """Return the bits of ``erf(a / sqrt(2))``, given those of a, which is positive."""
    builder = step.builder
    a = builder.bitcast(bits, _HALF_VALUES)
    piece = builder.ashr(builder.sub(bits, step.every(bits, _FIRST_PIECE)), step.every(bits, _DIGITS))
    piece = _piece_between(step, piece, 0, _LAST)
    above = builder.fcmp_ordered(">", a, step.every(a, _ONE_ABOVE))
    piece = builder.select(above, step.every(bits, _ONE), piece)
    sum_ = step.permuted(piece, _POWERS[-1])
    for coefficients in _POWERS[-2::-1]:
        sum_ = step.fused(sum_, a, step.permuted(piece, coefficients))
    return builder.bitcast(sum_, _HALF_WORDS)


def _piece_between(step: Step, value: Any, least: int, most: int) -> Any:
    builder, low, high = step.builder, step.every(value, least), step.every(value, most)
    value = builder.select(builder.icmp_signed("<", value, low), low, value)
    return builder.select(builder.icmp_signed(">", value, high), high, value)


def _alone(function: Callable[[Step, Any], Any]) -> Any:
    """Return what writes a function of 32 values ``x`` from ``index`` on to ``out``; both are float32."""

    @intrinsic
    def write(typing_context: Any, index: Any, x: Any, out: Any) -> Any:
        def emit(step: Step, place: Any) -> None:
            step.store(function(step, step.load(1, place, VALUES)), 2, place)

        return emitted(emit, index, x, out)

    return write


def _encoded(function: Callable[[Step, Any], Any]) -> Any:
    """Return what writes the same and the packed codes of x: one's waits are the other's time.

    ``bounds`` is a tuple of 1, 3, 7 or 15 float32 numbers, ascending, for 1 to 4 bits; ``index`` a multiple of 32.
    """

    @intrinsic
    def write(typing_context: Any, index: Any, x: Any, bounds: Any, out: Any, packed: Any) -> Any:
        def emit(step: Step, place: Any) -> None:
            value = step.load(1, place, VALUES)
            step.store(function(step, value), 3, place)
            store_codes(step, value, place, 2, 4)

        return emitted(emit, index, x, bounds, out, packed)

    return write


silu, encoded_silu = _alone(_silu), _encoded(_silu)
gelu, encoded_gelu = _alone(_gelu), _encoded(_gelu)
