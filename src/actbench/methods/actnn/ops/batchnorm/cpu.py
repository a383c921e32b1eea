"""The backward pass of batch norm on the CPU: threads share the rows, and the loops over a row's elements vectorise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import prange
from torch import Tensor

from actbench.methods.actnn.ops.batchnorm.reference import LANES, vector_of
from actbench.methods.actnn.ops.groupquant.cpu import restore, values_of
from actbench.ops.bitpack.cpu import unpack
from actbench.ops.cpu import BLOCK, at, inlined, kernel
from actbench.ops.cpu.halves import FLOAT32, KINDS, narrow

_MOST = 1024  # elements of the largest group


def backward(
    dx: Tensor,
    for_weight: Tensor,
    for_bias: Tensor,
    sums: Tensor,
    dy: Tensor,
    codes: Tensor,
    words: Tensor,
    bits: int,
    group_size: int,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
) -> None:
    """Fill the results of the operator."""
    samples, channels = dy.shape[:2]
    rows, columns = samples * channels, math.prod(dy.shape[2:])
    together = max(1, BLOCK // columns)  # rows of a unit of a thread's work
    units = -(-rows // together)
    source = codes.data_ptr(), codes.numel(), words.data_ptr(), bits, group_size
    place = rows, channels, columns, together, dy.data_ptr(), KINDS[dy.dtype], mean.data_ptr()
    _sums(units * BLOCK, *source, *place, vector_of(columns, dy.dtype), sums.data_ptr())
    # one block: a channel's numbers are few
    targets = invstd.data_ptr(), for_weight.data_ptr(), for_bias.data_ptr()
    _totals(1, rows, channels, samples * columns, sums.data_ptr(), *targets)
    parts = invstd.data_ptr(), weight.data_ptr(), sums.data_ptr(), dx.data_ptr()
    _gradient(units * BLOCK, *source, *place, *parts)


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
    half = vector // 2
    while half > 0:
        for lane in range(LANES):
            for i in range(half):
                place = lane * vector + i
                sums[place] = np.float32(sums[place] + sums[place + half])
        half //= 2
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            sums[lane * vector] = np.float32(sums[lane * vector] + sums[(lane + half) * vector])
        half //= 2
    return sums[0]


@kernel
def _sums(
    units: int,
    codes: int,
    size: int,
    words: int,
    bits: int,
    group_size: int,
    rows: int,
    channels: int,
    columns: int,
    together: int,
    dy: int,
    kind: int,
    mean: int,
    vector: int,
    sums: int,
) -> None:
    stream = at(codes, size, np.uint8)
    found = at(words, (rows * columns + group_size - 1) // group_size, np.uint32)
    centers, target = at(mean, channels, np.float32), at(sums, 2 * rows, np.float32)
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
                for i in range(min(turn, columns - start)):
                    of_dy[i] = np.float32(of_dy[i] + gradient[start + i])
                    product = np.float32(gradient[start + i] * np.float32(x[start + i] - center))
                    of_products[i] = np.float32(of_products[i] + product)
            target[row] = _folded(of_dy, vector)
            target[rows + row] = _folded(of_products, vector)


@kernel
def _totals(
    units: int,
    rows: int,
    channels: int,
    count: int,
    sums: int,
    invstd: int,
    for_weight: int,
    for_bias: int,
) -> None:
    parts, slopes = at(sums, 2 * rows, np.float32), at(invstd, channels, np.float32)
    weights, biases = at(for_weight, channels, np.float32), at(for_bias, channels, np.float32)
    number = np.float32(count)
    for _ in range(units):
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


@kernel
def _gradient(
    units: int,
    codes: int,
    size: int,
    words: int,
    bits: int,
    group_size: int,
    rows: int,
    channels: int,
    columns: int,
    together: int,
    dy: int,
    kind: int,
    mean: int,
    invstd: int,
    weight: int,
    sums: int,
    dx: int,
) -> None:
    stream = at(codes, size, np.uint8)
    found = at(words, (rows * columns + group_size - 1) // group_size, np.uint32)
    centers, slopes = at(mean, channels, np.float32), at(invstd, channels, np.float32)
    weights, parts = at(weight, channels, np.float32), at(sums, 2 * rows, np.float32)
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
