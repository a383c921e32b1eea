"""Sketches made of drawn rows of the matrix: no product with S, O(k d) work, k rows to store.

``rows`` and ``rows_distinct`` draw all rows with the same probability and repeat the draw from the seed. ``norm`` and
``wta`` need the lengths of the rows of X, which the backward pass does not have, so they store the numbers of the drawn
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from actbench.ops.noise import random_words
from actbench.units import MIB

CHUNK_BYTES = 2 * MIB


def working_type(matrix: Tensor) -> torch.dtype:
    """Return float64 for a float64 matrix and float32, the type sketches are summed in, for all others."""
    return torch.float64 if matrix.dtype == torch.float64 else torch.float32


_POSITIVE = (1 << 63) - 1
_FRACTION_BITS = 52


def uniform(seed: Tensor, rows: int, size: int) -> Tensor:
    """Return ``size`` rows drawn with replacement, each with the same probability: (size,) int64."""
    # the remainder of 63 bits prefers no row by more than rows / 2**63
    return (random_words(seed, 0, size) & _POSITIVE) % rows


def distinct(seed: Tensor, rows: int, size: int) -> Tensor:
    """Return ``size`` different rows in random order: (size,) int64. Sorts a word per row, 24 bytes a row meanwhile."""
    # stable, so that words which are equal come in one order on every device
    return random_words(seed, 0, rows).argsort(stable=True)[:size]


def fractions(seed: Tensor, size: int) -> Tensor:
    """Return ``size`` numbers from 0 to below 1: (size,) float64, of 52 random bits each."""
    bits = random_words(seed, 0, size) & ((1 << _FRACTION_BITS) - 1)  # a double holds each number of them exactly
    return bits.double() * 2.0**-_FRACTION_BITS


Uniform = Literal["rows", "rows_distinct"]
Weighted = Literal["norm", "wta"]


def project(matrix: Tensor, seed: Tensor, size: int, kind: Uniform) -> Tensor:
    """Return sqrt(rows / k) times k uniformly drawn rows of (rows, d), ``(k, d)`` in the working type.

    ``rows`` draws with replacement, ``rows_distinct`` without. The seed, 0-d int64, fixes the draw.
    """
    rows = matrix.shape[0]
    draw = distinct if kind == "rows_distinct" else uniform
    return taken(matrix, draw(seed, rows, size)) * math.sqrt(rows / size)


def compress(matrix: Tensor, seed: Tensor, size: int, kind: Weighted) -> tuple[Tensor, Tensor]:
    """Draw k rows of (rows, d) by their length and weight them so that the sum of their products has no bias.

    ``norm`` draws row i with probability p_i = |x_i| / sum |x| and weight 1 / (k p_i). ``wta`` keeps the longest rows
    with weight 1 and draws the others the same way: WTA-CRS, arXiv 2305.15265.

    Returns:
        The weighted rows, (k, d) in the working type, and their numbers in the matrix, (k,) int32, 4 k bytes (int64
            from 2**31 rows on). NaN or infinity anywhere in the matrix makes NaN of the sketch. Probabilities come from
            float64 sums; their last bit may differ between devices, and so, rarely, may a drawn row.
    """
    chosen, weights = _CHOICES[kind](row_norms(matrix), seed, size)
    numbers = chosen.to(number_type(matrix.shape[0]))
    return taken(matrix, chosen) * weights[:, None].to(working_type(matrix)), numbers


def number_type(rows: int) -> torch.dtype:
    """Return the type that stores the numbers of ``rows`` rows."""
    # numbers begin at 0, so that 2**31 rows still fit
    return torch.int32 if rows <= 2**31 else torch.int64


def taken(matrix: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen rows, (k, d) in the working type."""
    return matrix.index_select(0, chosen).to(working_type(matrix))


def row_norms(matrix: Tensor) -> Tensor:
    """Return |x_i| of every row: (rows,) float64, from squares summed in the working type, 2 MiB of rows at a time."""
    dtype = working_type(matrix)
    step = max(CHUNK_BYTES // (max(matrix.shape[1], 1) * dtype.itemsize), 1)
    return torch.cat([torch.linalg.vector_norm(part.to(dtype), dim=1) for part in torch.split(matrix, step)]).double()


def winners(ascending: Tensor, size: int) -> Tensor:
    """Return how many of the longest rows ``wta`` keeps: c of 0 .. k - 1 with the least (1 - sum_C p) / (k - c).

    This rule of arXiv 2305.15265 gives the drawn rows the smallest weight. ``ascending`` holds the cumulative sums of
    the lengths, the shortest row first: (..., rows). The result is an int64 tensor (...), so that nothing waits for the
    device.
    """
    left = ascending.flip(-1)[..., :size]
    return (left / torch.arange(size, 0, -1, device=left.device)).argmin(-1)


def _by_norm(norms: Tensor, seed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    upto = norms.cumsum(0)
    # a fraction may round up to the total, behind the last row
    drawn = _drawn(upto, upto[-1:], seed, size).clamp(max=len(norms) - 1)
    return drawn, _weights(upto[-1:] / size, norms[drawn])


def winner_take_all(norms: Tensor, seed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Choose k of the rows of each matrix by their lengths, (..., rows) float64: the longest, and others by chance.

    Returns:
        The numbers of the rows, (..., k) int64, and the weights that leave no bias, (..., k) float64.
    """
    norms, order = norms.sort(-1)
    upto = norms.cumsum(-1)
    kept = winners(upto, size)[..., None]
    last = norms.shape[-1] - 1 - kept
    left = upto.gather(-1, last)
    # as in _by_norm: a fraction may round up to the total
    drawn = _drawn(upto, left, seed, size).minimum(last)
    turn = torch.arange(size, device=norms.device)
    place = torch.where(turn < kept, norms.shape[-1] - 1 - turn, drawn)
    weights = torch.where(turn < kept, 1.0, _weights(left / (size - kept), norms.gather(-1, place)))
    return order.gather(-1, place), weights


def _drawn(upto: Tensor, total: Tensor, seed: Tensor, size: int) -> Tensor:
    """Return where the cumulative sums first exceed random fractions of the total; rows of length 0 are never drawn.

    A fraction that rounds up to the total gives the place behind the last.
    """
    lead = upto.shape[:-1]
    parts = fractions(seed, lead.numel() * size).view(*lead, size)
    return torch.searchsorted(upto, parts * total, right=True)


def _weights(share: Tensor, norms: Tensor) -> Tensor:
    """Return share / |x_i|; rows of length 0 are drawn only where all are 0, and weigh nothing."""
    return torch.where(norms == 0, 0.0, share / norms)


_CHOICES: dict[Weighted, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]]
_CHOICES = {"norm": _by_norm, "wta": winner_take_all}
