"""Random sketches of a matrix: a few combinations of its rows that estimate products without bias.

With S of k rows and E[S^T S] = I, the sketches of X and Y alone give (S Y)^T (S X), an unbiased estimate of Y^T X
(Bershatsky et al., "Memory-Efficient Backpropagation through Large Linear Layers", arXiv 2201.13195, eq. 3). S is never
stored: :func:`compress` returns the sketch of X and a key, and :func:`project` makes S again for Y from the key.

One operator draws the seed and makes the sketch. With two operators, a compiler might save the sketch of the forward
pass but draw the seed again in the backward pass, which makes another matrix S (docs/decisions/0005). The operator has
no tag ``nondeterministic_seeded``, so that a compiler may merge two sketches of one input, as layers do uncompiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from actbench.methods.randomized.ops.matrix import fourth_moment
from actbench.methods.randomized.ops.sketch import samples, transforms
from actbench.methods.randomized.ops.sketch.samples import working_type
from actbench.ops.library import EVERYWHERE, define, traced
from actbench.ops.noise import fresh_seed

Kind = Literal["gaussian", "rademacher", "dct", "dft", "hadamard", "rows", "rows_distinct", "norm", "wta"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True)
class Sketching:
    """Kind and size of a sketch.

    Attributes:
        kind: Kind of S.
        ratio: Rows of the sketch per row of the matrix, above 0 and at most 1; unused where ``dim`` is given.
        dim: Rows of the sketch.
        min: The fewest rows that a ratio may give.
        max: The most rows of the sketch.
    """

    kind: Kind = "rademacher"
    ratio: float = 0.2
    dim: int | None = None
    min: int | None = None
    max: int | None = None

    def size(self, rows: int) -> int:
        """Return k, at least 1, for a matrix of ``rows`` rows. From k = rows on, the matrix itself is smaller."""
        size = self.dim if self.dim is not None else max(int(self.ratio * rows), self.min or 1)
        return max(1, size if self.max is None else min(size, self.max))


def compress(matrix: Tensor, seed: Tensor, size: int, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the sketch S M of a matrix and the key that S is made again from.

    Args:
        matrix: (rows, d), of a float type.
        seed: 0-d int64 on the device of the matrix, fresh for each sketch.
        size: k, the rows of the sketch, below ``rows``.
        kind: Kind of S.

    Returns:
        The sketch, (k, d) in float64 for a float64 matrix and float32 for all others, scaled so that it can be stored
            in half precision; and the key: the seed itself, 8 bytes, or for ``norm`` and ``wta`` the numbers of the
            drawn rows, (k,) int32 on the matrix's device, 4 k bytes.
    """
    if kind == "norm" or kind == "wta":
        return samples.compress(matrix, seed, size, kind)
    return project(matrix, seed, size, kind), seed


def key_like(matrix: Tensor, size: int, kind: Kind) -> Tensor:
    """Return an empty tensor like the key that :func:`compress` gives; arguments as there."""
    if kind == "norm" or kind == "wta":
        return matrix.new_empty(size, dtype=samples.number_type(matrix.shape[0]))
    return matrix.new_empty((), dtype=torch.int64)


def project(matrix: Tensor, key: Tensor, size: int, kind: Kind) -> Tensor:
    """Return the factor of a matrix in the estimate of its product with the matrix whose sketch has this key.

    For ``norm`` and ``wta``, whose sketch holds the weights of the rows, this is the drawn rows without weights; for
    the other kinds it is the sketch S M: (k, d) in float64 for a float64 matrix and in float32 for all others.
    """
    if kind == "gaussian" or kind == "rademacher":
        return transforms.project(matrix, key, size, kind)
    if kind == "dct" or kind == "dft":
        return transforms.fourier(matrix, key, size, kind)
    if kind == "hadamard":
        return transforms.hadamard(matrix, key, size)
    if kind == "rows" or kind == "rows_distinct":
        return samples.project(matrix, key, size, kind)
    return samples.taken(matrix, key)


def _make(matrix: Tensor, size: int, kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    sketch, key = compress(matrix, fresh_seed(matrix), size, kind)
    # a seed that waits for the backward pass does not hold those that it lies with
    sketch = sketch if sketch.dtype == dtype else sketch.to(dtype)
    return sketch, key if key.untyped_storage().nbytes() == key.nbytes else key.clone()


@define(
    "fresh_sketch(Tensor matrix, SymInt size, str kind, ScalarType dtype) -> (Tensor sketch, Tensor key)",
    {EVERYWHERE: _make},
    tags=(),
)
def _traced(matrix: Tensor, size: int, kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return matrix.new_empty(size, matrix.shape[1], dtype=dtype), key_like(matrix, size, kind)


def fresh_sketch(matrix: Tensor, size: int, kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sketch of a matrix (rows, d) with a fresh seed, as ``dtype``, and the key that S is made again from.

    A tracer sees one operator. Otherwise its parts run one by one, so that simulations see what they allocate.

    Raises:
        KernelError: The seed cannot be drawn.
    """
    return (_traced if traced() else _make)(matrix, size, kind, dtype)


def variance(kind: Kind, x: Tensor, y: Tensor, size: int) -> float:
    """Return E |estimate - Y^T X|^2, Frobenius, of the estimate from a sketch of k = ``size`` rows, exactly.

    With a = sum_i |x_i|^2 |y_i|^2, b = |X|^2 |Y|^2, c = |X^T Y|^2 (Frobenius) and N rows it is 0 for k >= N, and:

    * gaussian, rademacher: (b + c + (m - 3) a) / k, m the fourth moment of an entry. The D_RMM of arXiv 2201.13195 is
      another number, between the values for the two kinds.
    * rows: (N a - c) / k; rows_distinct: the same times (N - k) / (N - 1), as of any sample without replacement.
    * dct, dft: (N a - c) / k, with a of the transformed X and Y.
    * hadamard: (b + c - 2 a) / k, which is rademacher's, times (P - k) / (P - 1), P being N rounded up to a power of
      two: each row of H D is a row of random signs, and the rows drawn are distinct.
    * norm: (sum_i |x_i|^2 |y_i|^2 / p_i - c) / k with p_i = |x_i| / sum |x|; wta: the same over the rows left to
      chance, with the rows left to draw.
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
    """Return D_SGD^2, the variance that the weight gradient Y^T X has anyway from the choice of its B >= 2 rows.

    B/(B-1) sum_i |x_i|^2 |y_i|^2 - |X^T Y|^2 / (B-1); arXiv 2201.13195 compares the variance of a sketch with it.
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
