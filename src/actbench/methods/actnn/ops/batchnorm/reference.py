"""The backward pass of batch norm in plain torch, the reference: every kernel must agree with it bit for bit.

A row is one channel in one sample. With x as decoded (:mod:`actbench.methods.actnn.ops.groupquant.reference`), not
rounded to its type, in float32 (float64 for float64), each operation rounded by itself, and N rows of a channel with M
elements in all:

    d      = x - mean
    s1, s2 = sums of dy and of dy * d, of each row; then of the rows, one sample after the other
    dbias  = s1
    dweight = s2 * invstd
    dx     = ((dy - s1 / M) - d * ((s2 / M) * (invstd * invstd))) * (weight * invstd)

A row is summed as a warp does it: 32 lanes take turns at :func:`vector_of` neighbours, and each lane adds up its first
neighbours, its second ones and so on. Then the halves of a lane's sums are added until one is left, then those of the
lanes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actbench.methods.actnn.ops.groupquant import reference as groupquant
from actbench.ops.library import wide

LANES = 32


def vector_of(columns: int, dtype: torch.dtype) -> int:
    """Return how many neighbours a lane takes: 8 of a half type where they divide the elements of a row, else 4.

    That is 16 bytes, beside those of the next lane: if a lane stored more by two instructions, each of them would write
    half of every sector of 32 bytes, which takes as long as the whole.
    """
    return 8 if columns % 8 == 0 and dtype.itemsize == 2 else 4


def backward(
    dy: Tensor, codes: Tensor, words: Tensor, bits: int, group_size: int, mean: Tensor, invstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dx, the gradients of weight and bias, and the sums of rows as the kernels leave them."""
    samples, channels = dy.shape[:2]
    gradient = wide(dy).reshape(samples, channels, -1)
    x = groupquant.decode(codes, words, bits, group_size, 0, dy.numel(), gradient.dtype).view(gradient.shape)
    d = x - mean[:, None]
    vector = vector_of(gradient.shape[2], dy.dtype)
    sums = torch.stack([_of_rows(gradient, vector), _of_rows(gradient * d, vector)])
    totals = torch.zeros_like(sums[:, 0])
    for sample in range(samples):
        totals = totals + sums[:, sample]
    count = math.prod(gradient.shape) // channels
    sums[0, 0], sums[1, 0] = totals[0] / count, totals[1] / count * (invstd * invstd)
    level, slope = sums[:, 0, :, None]
    dx = ((gradient - level) - d * slope) * (weight * invstd)[:, None]
    return dx.view(dy.shape).to(dy.dtype), totals[1] * invstd, totals[0], sums


def _of_rows(values: Tensor, vector: int) -> Tensor:
    """Return the sum of each row: (N, C) of (N, C, elements)."""
    turns = torch.nn.functional.pad(values, (0, -values.shape[2] % (LANES * vector)))
    turns = turns.view(*values.shape[:2], -1, LANES, vector)
    found = torch.zeros_like(turns[:, :, 0])
    for turn in range(turns.shape[2]):
        found = found + turns[:, :, turn]
    while found.shape[3] > 1:
        one, other = found.chunk(2, 3)
        found = one + other
    found = found.squeeze(3)
    while found.shape[2] > 1:
        one, other = found.chunk(2, 2)
        found = one + other
    return found.squeeze(2)
