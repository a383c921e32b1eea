"""Functions made of the exponential, on vectors, with the bits that torch's vectors have.

Torch computes exp in float32 as most vector libraries do, to within one unit in the last place: ``exp(v)`` is
``2**n * exp(r)`` with n the integer nearest to ``v / log(2)``, and with r found in two steps, since ``log(2)`` has more
digits than a float32; ``exp(r)`` is a polynomial. Its coefficients are those of SLEEF, which torch's vectors call: with
others the last bits would differ. Each step below rounds as there, so the result does; what is done there beyond the
limits of float32 is not repeated where it cannot be seen in the result.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from actbench.ops.cpu.compiled import intrinsic
from actbench.ops.cpu.lanes import MANY, VALUES, store_codes
from actbench.ops.cpu.vectors import INT, Step, emitted

_PER_LOG2 = 1.4426950408889634
_LOG2_HIGH, _LOG2_LOW = 0.693145751953125, 1.4286068e-6  # the first has few bits: n times it is exact
_POLYNOMIAL = (1.9852762e-4, 1.3930436e-3, 8.3333608e-3, 4.1666485e-2, 0.16666667, 0.5)  # of r, but for 1 + r

_SHIFT = 1.5 * 2.0**23  # a float32 of this size has no fraction, and counts in its lowest bits
_EXPONENT = 126  # of 0.5: the float32 with this in place of the exponent, counted from zero
_FRACTION_BITS = 23
_LEAST, _MOST = -86.0, 88.9  # beyond, 1 + exp is 1 or infinite; at them, n - 1 is -125 and 127


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


@intrinsic
def silu(typing_context: Any, index: Any, x: Any, out: Any) -> Any:
    """Write SiLU of 32 values.

    Args:
        typing_context: Numba's; callers leave it out.
        index: Of the first value.
        x: float32.
        out: float32.
    """

    def emit(step: Step, place: Any) -> None:
        step.store(_silu(step, step.load(1, place, VALUES)), 2, place)

    return emitted(emit, index, x, out)


@intrinsic
def encoded_silu(typing_context: Any, index: Any, x: Any, bounds: Any, out: Any, packed: Any) -> Any:
    """Write SiLU of 32 values and what :func:`actbench.ops.cpu.lanes.encode` does: one's waits are the other's time.

    Args:
        typing_context: Numba's; callers leave it out.
        index: Of the first value, a multiple of 32.
        x: float32.
        bounds: A tuple of 1, 3, 7 or 15 float32 numbers, ascending, for 1 to 4 bits.
        out: float32.
        packed: uint8, the codes of all values.
    """

    def emit(step: Step, place: Any) -> None:
        value = step.load(1, place, VALUES)
        step.store(_silu(step, value), 3, place)
        store_codes(step, value, place, 2, 4)

    return emitted(emit, index, x, bounds, out, packed)
