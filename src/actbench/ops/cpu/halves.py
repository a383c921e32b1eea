"""Float types, random words and noise in Numba. It has no half precision: values travel as their bits, in integers.

Widening is exact and narrowing rounds once to nearest even, as torch does. The loops have no branches, so that they
vectorise; every intermediate is cast back to 32 bits, because Numba widens integer results to 64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from actbench.ops import noise
from actbench.ops.cpu import at, inlined, intrinsic
from actbench.ops.cpu.vectors import INT, Step

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
"""The kind that kernels take, by type."""

_GOLDEN, _FIRST, _SECOND = np.uint64(noise.GOLDEN), np.uint64(noise.FIRST), np.uint64(noise.SECOND)
_HASHES = tuple(np.uint32(factor) for factor in noise.HASHES)
_POWERS, _SUMS = np.array(noise.POWERS, np.uint32), np.array(noise.SUMS, np.uint32)


@inlined
def widen(source: np.ndarray, kind: int, target: np.ndarray) -> None:
    """Write the float32 bits, uint32, of every value of ``source``: uint32 for float32, uint16 for the half types."""
    if kind == FLOAT32:
        for i in range(source.size):
            target[i] = np.uint32(source[i])
    elif kind == BFLOAT16:
        for i in range(source.size):
            target[i] = np.uint32(np.uint32(source[i]) << np.uint32(16))
    else:
        for i in range(source.size):
            target[i] = _widened_half(np.uint32(source[i]))


@inlined
def _widened_half(half: np.uint32) -> np.uint32:
    sign = np.uint32((half & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(half & np.uint32(0x7FFF))
    # the biases of the exponents differ by 127 - 15
    rebias = np.uint32(112 << 23)
    normal = np.uint32(np.uint32(magnitude << np.uint32(13)) + rebias)
    special = np.uint32(normal + rebias)  # infinities and NaN: the largest exponent of either type
    # numbers below 2**-14 are multiples of 2**-24, without a leading one
    tiny = np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-24)).view(np.uint32)
    wide = special if magnitude >= np.uint32(0x7C00) else normal
    wide = tiny if magnitude < np.uint32(0x0400) else wide
    return np.uint32(wide | sign)


@inlined
def clear_signs(wide: np.ndarray) -> None:
    """Replace float32 values by their absolutes, in place, given as uint32."""
    for i in range(wide.size):
        wide[i] = np.uint32(wide[i] & np.uint32(0x7FFFFFFF))


@inlined
def narrow(source: np.ndarray, kind: int, target: np.ndarray) -> None:
    """Round float32 bits to the type of ``target``, uint32 or uint16; the reverse of :func:`widen`."""
    if kind == FLOAT32:
        for i in range(target.size):
            target[i] = source[i]
    elif kind == BFLOAT16:
        for i in range(target.size):
            target[i] = _rounded_brain(source[i])
    else:
        for i in range(target.size):
            target[i] = _rounded_half(source[i])


@inlined
def _rounded_brain(wide: np.uint32) -> np.uint32:
    # a tie goes to the even neighbour: half of the last place less one, and one more where that place is odd
    odd = np.uint32(np.uint32(wide >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(wide + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    is_nan = np.uint32(wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # rounding up could carry a NaN on to infinity, or over the sign; this is the NaN that torch writes
    return np.uint32(0x7FC0) if is_nan else rounded


@inlined
def _rounded_half(wide: np.uint32) -> np.uint32:
    sign = np.uint32(np.uint32(wide >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(wide & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    rebias = np.uint32(112 << 23)
    normal = np.uint32(np.uint32(magnitude + np.uint32(0xFFF) + odd - rebias) >> np.uint32(13))
    # Below 2**-14 the last bit is 2**-24. The last bit of 0.5 is the same, so adding 0.5 rounds there.
    shifted = np.float32(np.uint32(magnitude).view(np.float32) + np.float32(0.5))
    tiny = np.uint32(np.float32(shifted).view(np.uint32) - np.uint32(0x3F000000))
    half = tiny if magnitude < np.uint32(113 << 23) else normal
    half = np.uint32(0x7C00) if magnitude >= np.uint32(0x477FF000) else half  # 65520 and above round to infinity
    half = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else half
    return np.uint32(half | sign)


@intrinsic
def fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c`` of float32 numbers, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@inlined
def fill_random(state: np.uint64, first: int, words: np.ndarray) -> None:
    """Write the words of a state from number ``first`` on, as :func:`actbench.ops.noise.words` returns them."""
    for i in range(words.size):
        word = state + np.uint64(first + i + 1) * _GOLDEN
        word = (word ^ (word >> np.uint64(30))) * _FIRST
        word = (word ^ (word >> np.uint64(27))) * _SECOND
        words[i] = word ^ (word >> np.uint64(31))


@inlined
def state_at(address: int) -> np.uint64:
    """Return the state of the seed at an address."""
    word = np.empty(1, np.uint64)
    fill_random(at(address, 1, np.uint64)[0], 0, word)
    return np.uint64(word[0])


@intrinsic
def _put_run(
    typing_context: Any, target: Any, first: Any, word: Any, increment: Any, powers: Any, sums: Any, number: Any
) -> Any:
    """Write the eight floats of a run from ``first`` on; ``number`` is that of its first number in the sequence.

    LLVM makes no vectors of eight products by itself.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        step, eight = Step(context, builder, signature, arguments), ir.VectorType(INT, 8)
        parts = []
        for factor, table in ((2, 4), (3, 5)):
            spread = step.spread(step.argument(factor, INT), 8)
            parts.append(builder.mul(spread, step.load(table, arguments[6], eight)))
        upper = builder.lshr(builder.add(*parts), ir.Constant(eight, [17] * 8))
        # 0x43800000 is 256, whose last place is 2**-15: the 15 bits of a number become its fraction
        step.store(builder.or_(upper, ir.Constant(eight, [0x43800000] * 8)), 0, arguments[1])
        return context.get_dummy_value()

    return types.void(target, types.int64, types.uint64, types.uint64, powers, sums, types.int64), generate


@inlined
def fill_noise(state: np.uint64, unit: int, width: int, target: np.ndarray) -> None:
    """Write 256 + n / 2**15, float32, of each number n of a unit; see :func:`actbench.ops.noise.numbers`.

    The size of ``target`` is a multiple of 8, and at most the unit's.
    """
    bits = target.view(np.uint32)
    low, high = np.uint32(state), np.uint32(state >> np.uint64(32))
    for place in range(width):
        word = np.uint32(np.uint32(unit * width + place) * _HASHES[0] + low)
        word = np.uint32(np.uint32(word ^ np.uint32(word >> np.uint32(16))) * _HASHES[1] + high)
        word = np.uint32(word ^ np.uint32(word >> np.uint32(13)))
        increment = np.uint32(word | np.uint32(1))
        word = np.uint32(word * _HASHES[2])
        word = np.uint32(word ^ np.uint32(word >> np.uint32(16)))
        for run in range(4):
            first = 8 * (run * width + place)
            if first >= bits.size:
                break
            _put_run(bits, first, word, increment, _POWERS, _SUMS, 8 * run)
