"""Sketches by a matrix S of independent entries, made again from its seed a few rows of S^T at a time."""

from __future__ import annotations

from torch import Tensor

from actbench.codecs.sketch.precision import CHUNK_BYTES, working_type
from actbench.ops import sketch
from actbench.ops.sketch import sketch_rows

_LEAST_ROWS = 64  # with fewer, adding to the (k, d) sums moves more bytes than the products are worth


def project(matrix: Tensor, seed: Tensor, size: int, kind: sketch.Kind) -> Tensor:
    """Return S M / sqrt(k), S (k, rows) of entries of mean 0 and mean square 1.

    Besides the result, at most 2 MiB of S exist at a time, or 64 rows of S^T where these are more.

    Args:
        matrix: (rows, d), of a float type.
        seed: 0-d int64 CPU tensor that stands for S.
        size: k, the rows of the sketch.
        kind: Distribution of the entries of S.

    Returns:
        (k, d) in the working type.
    """
    dtype = working_type(matrix)
    total = matrix.new_zeros(size, matrix.shape[1], dtype=dtype)
    step = max(CHUNK_BYTES // (size * dtype.itemsize), _LEAST_ROWS)
    for first in range(0, matrix.shape[0], step):
        part = matrix[first : first + step]
        entries = sketch_rows(seed, first, part.shape[0], size, kind, dtype, matrix.device)
        total.addmm_(entries.t(), part.to(dtype), alpha=size**-0.5)
    return total
