"""A step of an optimizer whose state is SmaQ blocks, on the CPU: threads share the blocks; each is read once.

:mod:`actbench.methods.formats.ops.smaqstep.rules` says what is computed. Every intermediate is cast back to 32 bits, as
in :mod:`actbench.methods.actnn.ops.groupquant.cpu`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import prange
from torch import Tensor

from actbench.methods.actnn.ops.groupquant.cpu import values_of
from actbench.methods.formats.ops.smaq.cpu import read_block, work_of, workspace, write_block
from actbench.methods.formats.ops.smaq.cpublock import float_of
from actbench.methods.formats.ops.smaq.format import Format
from actbench.methods.formats.ops.smaqstep.rules import AdamRule, SgdRule
from actbench.ops.cpu import BLOCK, at, inlined, kernel
from actbench.ops.cpu.halves import FLOAT32, KINDS, narrow
from actbench.ops.noise import state_of

_MOST = 256  # elements of an optimizer's largest block


def adam(
    param: Tensor, grad: Tensor, means: Tensor, roots: Tensor, form: Format, seeds: tuple[int, int], rule: AdamRule
) -> None:
    """Step a parameter and its moments, in place."""
    place = param.data_ptr(), grad.data_ptr(), KINDS[param.dtype], param.numel()
    states = tuple(state_of(seed) for seed in seeds)
    bytes_of = means.data_ptr(), roots.data_ptr(), means.numel(), form.block_bytes
    _adam(work_of(param.numel(), form.block), *place, *bytes_of, *form, *states, _singles(rule))


def sgd(param: Tensor, grad: Tensor, buffers: Tensor, form: Format, seed: int, rule: SgdRule) -> None:
    """Step a parameter and its buffer, in place."""
    place = param.data_ptr(), grad.data_ptr(), KINDS[param.dtype], param.numel()
    bytes_of = buffers.data_ptr(), buffers.numel(), form.block_bytes
    _sgd(work_of(param.numel(), form.block), *place, *bytes_of, *form, state_of(seed), _singles(rule))


def _singles(rule: tuple[float, ...]) -> tuple[np.float32, ...]:
    return tuple(np.float32(value) for value in rule)


@numba.njit(error_model="numpy")  # else a zero divisor raises, and no loop vectorises
def _step_adam(p: np.ndarray, g: np.ndarray, m: np.ndarray, s: np.ndarray, least: np.float32, rule: Any) -> None:
    sign, kept, decay, from_gradient, toward, beta2, rest2, correction, eps, rate = rule
    from_there, decays = from_gradient > np.float32(0), decay != np.float32(0)
    for i in range(p.size):
        gradient = np.float32(g[i] * sign)
        gradient = np.float32(gradient + np.float32(p[i] * decay)) if decays else gradient
        weight = np.float32(p[i] * kept)
        start = gradient if from_there else m[i]
        mean = np.float32(start + np.float32(np.float32(gradient - m[i]) * toward))
        before = s[i] if s[i] > least else least
        square = np.float32(np.float32(before * before) * beta2)
        square = np.float32(square + np.float32(np.float32(gradient * rest2) * gradient))
        root = np.float32(np.sqrt(square))
        divisor = np.float32(np.float32(root * correction) + eps)
        p[i] = np.float32(weight + np.float32(np.float32(mean * rate) / divisor))
        m[i], s[i] = mean, root


@inlined
def _step_sgd(p: np.ndarray, g: np.ndarray, b: np.ndarray, rule: Any) -> None:
    sign, decay, momentum, added, nesterov, rate = rule
    looks_ahead, decays = nesterov > np.float32(0), decay != np.float32(0)
    for i in range(p.size):
        gradient = np.float32(g[i] * sign)
        gradient = np.float32(gradient + np.float32(p[i] * decay)) if decays else gradient
        b[i] = np.float32(np.float32(b[i] * momentum) + np.float32(gradient * added))
        direction = np.float32(gradient + np.float32(b[i] * momentum)) if looks_ahead else b[i]
        p[i] = np.float32(p[i] + np.float32(direction * rate))


@inlined
def _store(values: np.ndarray, kind: int, address: int) -> None:
    """Write float32 numbers as a half type; a float32 parameter was stepped in place."""
    if kind != FLOAT32:
        narrow(values.view(np.uint32), kind, at(address, values.size, np.uint16))


@kernel
def _adam(
    units: int,
    param: int,
    grad: int,
    kind: int,
    total: int,
    means: int,
    roots: int,
    size: int,
    block_bytes: int,
    main_bits: int,
    outlier_bits: int,
    outliers: int,
    block: int,
    mean_state: np.uint64,
    root_state: np.uint64,
    rule: Any,
) -> None:
    bits, per_unit = (main_bits, outlier_bits), BLOCK // block
    for unit in prange(units):
        work, wide_p, wide_g = workspace(), np.empty(_MOST, np.uint32), np.empty(_MOST, np.uint32)
        moments = np.empty((2, _MOST), np.float32)
        for index in range(unit * per_unit, min((unit + 1) * per_unit, (total + block - 1) // block)):
            first, begin = index * block, index * block_bytes
            count, length = min(block, total - first), min(block_bytes, size - begin)
            for moment in range(2):  # a loop, because its body takes long to compile
                packed = at((means if moment == 0 else roots) + begin, length, np.uint8)
                read_block(packed, bits, work, moments[moment, :count])
            step = np.float32(float_of(work.header[1]) / np.float32((1 << (main_bits - 2)) - 1))
            p = values_of(param, kind, first, first + count, wide_p)
            g = values_of(grad, kind, first, first + count, wide_g)
            least = np.float32(np.float32(0.5) * step)
            _step_adam(p, g, moments[0, :count], moments[1, :count], least, rule)
            _store(p, kind, param + 2 * first)
            for moment in range(2):
                packed = at((means if moment == 0 else roots) + begin, length, np.uint8)
                state = mean_state if moment == 0 else root_state
                write_block(moments[moment, :count], bits, (outliers, block), first, state, True, work, packed)


@kernel
def _sgd(
    units: int,
    param: int,
    grad: int,
    kind: int,
    total: int,
    buffers: int,
    size: int,
    block_bytes: int,
    main_bits: int,
    outlier_bits: int,
    outliers: int,
    block: int,
    state: np.uint64,
    rule: Any,
) -> None:
    stream = at(buffers, size, np.uint8)
    bits, per_unit = (main_bits, outlier_bits), BLOCK // block
    for unit in prange(units):
        work, wide_p, wide_g = workspace(), np.empty(_MOST, np.uint32), np.empty(_MOST, np.uint32)
        room = np.empty(_MOST, np.float32)
        for index in range(unit * per_unit, min((unit + 1) * per_unit, (total + block - 1) // block)):
            first, begin, end = index * block, index * block_bytes, min((index + 1) * block_bytes, size)
            count = min(block, total - first)
            b = room[:count]
            read_block(stream[begin:end], bits, work, b)
            p, g = (
                values_of(param, kind, first, first + count, wide_p),
                values_of(grad, kind, first, first + count, wide_g),
            )
            _step_sgd(p, g, b, rule)
            _store(p, kind, param + 2 * first)
            write_block(b, bits, (outliers, block), first, state, True, work, stream[begin:end])
