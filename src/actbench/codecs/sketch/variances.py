"""Exact variances of the estimates that sketches give, and the variance that a batch has anyway.

With a = sum_i |x_i|^2 |y_i|^2, b = |X|^2 |Y|^2, c = |X^T Y|^2 (Frobenius), N rows and k of the sketch:

* gaussian, rademacher: (b + c + (m - 3) a) / k, m the fourth moment of an entry. The D_RMM of arXiv 2201.13195 is not
  this: it stands between the values for the two kinds.
* rows: (N a - c) / k; rows_distinct: the same times (N - k) / (N - 1), as of any sample without replacement.
* dct, dft: (N a - c) / k, with a of the transformed X and Y.
* hadamard: (b + c - 2 a) / k, which is rademacher's, times (P - k) / (P - 1), P being N rounded up to a power of two:
  each row of H D is a row of random signs, and the rows drawn are distinct.
* norm: (sum_i |x_i|^2 |y_i|^2 / p_i - c) / k with p_i = |x_i| / sum |x|; wta: the same over the rows left to chance,
  with the rows left to draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.codecs.sketch import samples, transforms
from actbench.codecs.sketch.precision import working_type
from actbench.codecs.sketch.sketching import Kind
from actbench.ops.sketch import fourth_moment


def variance(kind: Kind, x: Tensor, y: Tensor, size: int) -> float:
    """Return E |estimate - Y^T X|^2, Frobenius, of the estimate from a sketch, exactly; 0 where nothing is sketched.

    Args:
        kind: What S is.
        x: (N, d_in), the matrix whose sketch is kept.
        y: (N, d_out).
        size: k, the rows of the sketch. From N on the matrix itself is kept.
    """
    rows = x.shape[0]
    if size >= rows:
        return 0.0
    if kind == "norm" or kind == "wta":
        return _weighted(x, y, size, kind)
    if kind == "dct" or kind == "dft":
        every = torch.arange(rows, device=x.device)
        x, y = (transforms.transform_rows(each, every, kind) for each in (x, y))
    x_rows, y_rows = _row_squares(x), _row_squares(y)
    spread, product = float(x_rows @ y_rows), _product_square(x, y)
    if kind == "gaussian" or kind == "rademacher":
        return (float(x_rows.sum() * y_rows.sum()) + product + (fourth_moment(kind) - 3) * spread) / size
    if kind == "hadamard":
        padded = 1 << (rows - 1).bit_length()
        whole = float(x_rows.sum() * y_rows.sum()) + product - 2 * spread
        return _without_replacement(whole / size, padded, size)
    drawn = (rows * spread - product) / size
    return _without_replacement(drawn, rows, size) if kind == "rows_distinct" else drawn


def batch_variance(x: Tensor, y: Tensor) -> float:
    """Return D_SGD^2, the variance that the weight gradient Y^T X has anyway from the choice of its rows.

    B/(B-1) sum_i |x_i|^2 |y_i|^2 - |X^T Y|^2 / (B-1), arXiv 2201.13195, what the variance of a sketch is compared with.

    Args:
        x: (B, d_in), with B at least 2.
        y: (B, d_out).
    """
    rows = x.shape[0]
    spread = float(_row_squares(x) @ _row_squares(y))
    return (rows * spread - _product_square(x, y)) / (rows - 1)


def _weighted(x: Tensor, y: Tensor, size: int, kind: samples.Weighted) -> float:
    norms, order = samples.row_norms(x).sort()
    kept = int(samples.winners(norms.cumsum(0), size)) if kind == "wta" else 0
    left = order[: len(order) - kept]
    spread = float(norms[: len(left)].sum() * (norms[: len(left)] @ _row_squares(y)[left]))
    return (spread - _product_square(x[left], y[left])) / (size - kept)


def _without_replacement(drawn: float, rows: int, size: int) -> float:
    return drawn * (rows - size) / (rows - 1)


def _row_squares(matrix: Tensor) -> Tensor:
    """Return |x_i|^2 of every row, (N,) float64."""
    return samples.row_norms(matrix).square()


def _product_square(x: Tensor, y: Tensor) -> float:
    """Return |X^T Y|^2, of a product in the working type."""
    dtype = working_type(x)
    return float((x.to(dtype).t() @ y.to(dtype)).double().square().sum())
