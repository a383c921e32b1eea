"""Random sketches of a matrix: a few random combinations of its rows, which give back products without bias.

With S of independent entries of mean 0 and mean square 1, k rows: E[S^T S / k] = I, so from the sketches of X and Y
alone (S Y)^T (S X) / k is an unbiased estimate of Y^T X (Bershatsky et al., "Memory-Efficient Backpropagation through
Large Linear Layers", arXiv 2201.13195, eq. 3). S is made again from its seed, a few rows of S^T at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actbench.ops.sketch import Kind, fourth_moment, sketch_rows
from actbench.units import MIB

_CHUNK_BYTES = 2 * MIB
_LEAST_ROWS = 64  # with fewer, adding to the (k, d) sums moves more bytes than the products are worth


@dataclass(frozen=True)
class Sketching:
    """How large a sketch is and what its matrix is made of.

    Attributes:
        kind: Distribution of the entries of S.
        ratio: Rows of the sketch per row of the matrix, above 0 and at most 1; unused where ``dim`` is given.
        dim: Rows of the sketch.
        min: The fewest rows that a ratio may give.
        max: The most rows that a ratio may give.
    """

    kind: Kind = "gaussian"
    ratio: float = 0.2
    dim: int | None = None
    min: int | None = None
    max: int | None = None

    def size(self, rows: int) -> int:
        """Return k, at least 1, for a matrix of so many rows. From k = rows on, the matrix itself is the smaller."""
        size = self.dim if self.dim is not None else max(int(self.ratio * rows), self.min or 1)
        return max(1, size if self.max is None else min(size, self.max))


def project(matrix: Tensor, seed: Tensor, size: int, kind: Kind) -> Tensor:
    """Return S M / sqrt(k): the sketch, scaled so that it can be stored in half precision.

    Args:
        matrix: (rows, d), of a float type.
        seed: 0-d int64 CPU tensor that stands for S.
        size: k, the rows of the sketch.
        kind: Distribution of the entries of S.

    Returns:
        (k, d) in float64 for a float64 matrix and in float32, the type it is summed in, for all others.
    """
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    total = matrix.new_zeros(size, matrix.shape[1], dtype=dtype)
    step = max(_CHUNK_BYTES // (size * dtype.itemsize), _LEAST_ROWS)
    for first in range(0, matrix.shape[0], step):
        part = matrix[first : first + step]
        entries = sketch_rows(seed, first, part.shape[0], size, kind, dtype, matrix.device)
        total.addmm_(entries.t(), part.to(dtype), alpha=size**-0.5)
    return total


def product_variance(x: Tensor, y: Tensor, size: int, kind: Kind) -> float:
    """Return the exact variance of the estimate of Y^T X: E |estimate - Y^T X|^2, Frobenius.

    (|X|^2 |Y|^2 + |X^T Y|^2 + (m - 3) sum_i |x_i|^2 |y_i|^2) / k, with m the fourth moment of an entry of S. The D_RMM
    of arXiv 2201.13195 is not this: it stands between the values for the two kinds.

    Args:
        x: (rows, d_in).
        y: (rows, d_out).
        size: k, the rows of the sketch.
        kind: Distribution of the entries of S.
    """
    x, y = x.double(), y.double()
    x_rows, y_rows = x.square().sum(1), y.square().sum(1)
    whole = x_rows.sum() * y_rows.sum() + (x.t() @ y).square().sum()
    return float(whole + (fourth_moment(kind) - 3) * (x_rows @ y_rows)) / size


def batch_variance(x: Tensor, y: Tensor) -> float:
    """Return D_SGD^2, the variance that the weight gradient Y^T X has anyway from the choice of its rows.

    B/(B-1) sum_i |x_i|^2 |y_i|^2 - |X^T Y|^2 / (B-1), arXiv 2201.13195, what the variance of a sketch is compared with.

    Args:
        x: (B, d_in), with B at least 2.
        y: (B, d_out).
    """
    x, y = x.double(), y.double()
    rows = x.shape[0]
    spread = x.square().sum(1) @ y.square().sum(1)
    return float(rows * spread - (x.t() @ y).square().sum()) / (rows - 1)
