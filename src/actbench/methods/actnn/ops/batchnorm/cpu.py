"""The backward pass of batch norm on the CPU: threads share the rows, and the loops over a row's elements vectorise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from actbench.methods.actnn.ops.batchnorm.reference import LANES, vector_of
from actbench.methods.actnn.ops.groupquant.cpu import restore, values_of
from actbench.ops import bitpack
from actbench.ops.bitpack.cpu import unpack
from actbench.ops.cpu import BLOCK, at, inlined, kernel
from actbench.ops.cpu.halves import FLOAT32, KINDS, narrow

_MOST = 1024  # elements of the largest group


@functools.lru_cache(maxsize=4096)
def filler(shape: torch.Size, dtype: torch.dtype, bits: int, group_size: int) -> Callable[..., None]:
    """Return a function of the operator's results, dy, codes, words, mean, invstd and weight, for dy of one form.

    What the kernel needs but for addresses is the same in each call, and to make it takes a good part of one.
    """
    samples, channels, columns = shape[0], shape[1], math.prod(shape[2:])
    rows, together = samples * channels, max(1, BLOCK // columns)  # rows of a unit of a thread's work
    elements, size = -(-rows // together) * BLOCK, bitpack.packed_bytes(rows * columns, bits)
    place = size, bits, group_size, rows, channels, columns, together, KINDS[dtype], vector_of(columns, dtype)

    def run(*tensors: Tensor) -> None:
        _backward(elements, *place, *map(Tensor.data_ptr, tensors))

    return run


@inlined
def _decoded(
    stream: np.ndarray, found: np.ndarray, bits: int, group_size: int, start: int, eights: np.ndarray, out: np.ndarray
) -> None:
    """Write the elements from ``start`` on, float32, as many as ``out`` has."""
    end = start + out.size
    for group in range(start // group_size, (end + group_size - 1) // group_size):
        first, last = max(start, group * group_size), min(end, (group + 1) * group_size)
        eight, used = first // 8, (last + 7) // 8 - first // 8
        unpack(stream[eight * bits : min(stream.size, (eight + used) * bits)], bits, eights[:used])
        restore(eights.view(np.uint8)[first - 8 * eight :], found[group], bits, out[first - start : last - start])


@inlined
def _folded(sums: np.ndarray, vector: int) -> Any:
    """Return the sum of 32 lanes' sums of neighbours, halves by halves; in place."""
    for half in (4, 2, 1):  # constants, of which LLVM makes loops over vectors
        if half < vector:
            for lane in range(LANES):  # what is left of the lanes stays side by side
                for i in range(half):
                    one, other = sums[2 * lane * half + i], sums[2 * lane * half + half + i]
                    sums[lane * half + i] = np.float32(one + other)
    for half in (16, 8, 4, 2, 1):
        for lane in range(half):
            sums[lane] = np.float32(sums[lane] + sums[lane + half])
    return sums[0]


@inlined
def _add(dy: np.ndarray, x: np.ndarray, center: np.float32, of_dy: np.ndarray, of_products: np.ndarray) -> None:
    """Add one turn of the lanes, or the first elements of one, to their sums."""
    for i in range(dy.size):
        of_dy[i] = np.float32(of_dy[i] + dy[i])
        product = np.float32(dy[i] * np.float32(x[i] - center))
        of_products[i] = np.float32(of_products[i] + product)


@kernel
def _backward(
    units: int,
    size: int,
    bits: int,
    group_size: int,
    rows: int,
    channels: int,
    columns: int,
    together: int,
    kind: int,
    vector: int,
    dx: int,
    for_weight: int,
    for_bias: int,
    sums: int,
    dy: int,
    codes: int,
    words: int,
    mean: int,
    invstd: int,
    weight: int,
) -> None:
    stream = at(codes, size, np.uint8)
    found = at(words, (rows * columns + group_size - 1) // group_size, np.uint32)
    centers, slopes = at(mean, channels, np.float32), at(invstd, channels, np.float32)
    weights, parts = at(weight, channels, np.float32), at(sums, 2 * rows, np.float32)
    turn = LANES * vector
    for unit in prange(units):
        eights, wide = np.zeros(_MOST // 8 + 1, np.uint64), np.empty(columns, np.uint32)
        x = np.empty(columns, np.float32)
        of_dy, of_products = np.empty(turn, np.float32), np.empty(turn, np.float32)
        for row in range(unit * together, min((unit + 1) * together, rows)):
            gradient = values_of(dy, kind, row * columns, (row + 1) * columns, wide)
            _decoded(stream, found, bits, group_size, row * columns, eights, x)
            of_dy[:], of_products[:] = np.float32(0), np.float32(0)
            center = centers[row % channels]
            for start in range(0, columns, turn):
                _add(gradient[start : start + turn], x[start : start + turn], center, of_dy, of_products)
            parts[row] = _folded(of_dy, vector)
            parts[rows + row] = _folded(of_products, vector)

    _total(parts, rows // channels * columns, slopes, for_weight, for_bias)

    for unit in prange(units):
        eights, wide = np.zeros(_MOST // 8 + 1, np.uint64), np.empty(columns, np.uint32)
        x = np.empty(columns, np.float32)
        for row in range(unit * together, min((unit + 1) * together, rows)):
            gradient = values_of(dy, kind, row * columns, (row + 1) * columns, wide)
            _decoded(stream, found, bits, group_size, row * columns, eights, x)
            channel = row % channels
            center, level, slope = centers[channel], parts[channel], parts[rows + channel]
            factor = np.float32(weights[channel] * slopes[channel])
            if kind == FLOAT32:
                _write(gradient, x, center, level, slope, factor, at(dx + 4 * row * columns, columns, np.float32))
            else:
                _write(gradient, x, center, level, slope, factor, x)
                narrow(x.view(np.uint32), kind, at(dx + 2 * row * columns, columns, np.uint16))


@inlined
def _total(parts: np.ndarray, count: int, slopes: np.ndarray, for_weight: int, for_bias: int) -> None:
    """Add up the rows of each channel, write its gradients, and put means in the place of its first row's sums."""
    channels, rows = slopes.size, parts.size // 2
    weights, biases = at(for_weight, channels, np.float32), at(for_bias, channels, np.float32)
    number = np.float32(count)
    for channel in range(channels):
        of_dy, of_products = np.float32(0), np.float32(0)
        for row in range(channel, rows, channels):
            of_dy = np.float32(of_dy + parts[row])
            of_products = np.float32(of_products + parts[rows + row])
        biases[channel] = of_dy
        weights[channel] = np.float32(of_products * slopes[channel])
        parts[channel] = np.float32(of_dy / number)
        square = np.float32(slopes[channel] * slopes[channel])
        parts[rows + channel] = np.float32(np.float32(of_products / number) * square)


@inlined
def _write(
    dy: np.ndarray,
    x: np.ndarray,
    center: np.float32,
    level: np.float32,
    slope: np.float32,
    factor: np.float32,
    dx: np.ndarray,
) -> None:
    for i in range(dx.size):
        inclined = np.float32(np.float32(x[i] - center) * slope)
        dx[i] = np.float32(np.float32(np.float32(dy[i] - level) - inclined) * factor)
