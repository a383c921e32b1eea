"""The kinds of sketch behind one face, and sketches by a seed of their own.

The operator of a sketch draws the seed and uses it. A compiler that sees two operators, one that draws a seed and one
that makes a sketch by it, may keep the sketch of the forward pass and draw again in the backward pass, where the new
seed makes another matrix S: the estimate is then noise. The tag ``nondeterministic_seeded`` does not prevent it. One
operator that gives both gives them of one draw, in whichever pass it runs. It has not that tag, so that a compiler may
make one of two sketches of one input, as layers do that are not compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from actbench.codecs.sketch import samples, transforms
from actbench.ops.library import EVERYWHERE, HOST_NUMBER, define, traced
from actbench.ops.seeds import fresh_seed

Kind = Literal["gaussian", "rademacher", "dct", "dft", "hadamard", "rows", "rows_distinct", "norm", "wta"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True)
class Sketching:
    """How large a sketch is and how it is made.

    Attributes:
        kind: What S is.
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


def compress(matrix: Tensor, seed: Tensor, size: int, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the sketch S M of a matrix and the key that S is made again from.

    Args:
        matrix: (rows, d), of a float type.
        seed: 0-d int64 CPU tensor, fresh for each sketch.
        size: k, the rows of the sketch, below ``rows``.
        kind: What S is.

    Returns:
        The sketch, (k, d) in float64 for a float64 matrix and float32 for all others, scaled so that it can be stored
        in half precision; and the key: the seed itself, 8 bytes, or for ``norm`` and ``wta`` the numbers of the drawn
        rows, (k,) int32 on the matrix's device, 4 k bytes.
    """
    if kind == "norm" or kind == "wta":
        return samples.compress(matrix, seed, size, kind)
    return project(matrix, seed, size, kind), seed


def key_like(matrix: Tensor, size: int, kind: Kind) -> Tensor:
    """Return an empty tensor like the key that :func:`compress` gives; arguments as there."""
    if kind == "norm" or kind == "wta":
        return matrix.new_empty(size, dtype=samples.number_type(matrix.shape[0]))
    return torch.empty((), dtype=torch.int64, device="cpu")


def project(matrix: Tensor, key: Tensor, size: int, kind: Kind) -> Tensor:
    """Return what a matrix contributes to the estimate of its product with the one whose sketch has this key.

    For ``norm`` and ``wta``, whose sketch holds the weights of the rows, these are the rows as they are; for the others
    it is the sketch S M.

    Args:
        matrix: (rows, d), with the rows of the sketched matrix.
        key: From :func:`compress`.
        size: k, the rows of the sketch.
        kind: What S is.

    Returns:
        (k, d) in float64 for a float64 matrix and in float32 for all others.
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
    sketch, key = compress(matrix, fresh_seed(), size, kind)
    return sketch.to(dtype), key


@define(
    "fresh_sketch(Tensor matrix, SymInt size, str kind, ScalarType dtype) -> (Tensor sketch, Tensor key)",
    {EVERYWHERE: _make},
    tags=HOST_NUMBER,
)
def _traced(matrix: Tensor, size: int, kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return matrix.new_empty(size, matrix.shape[1], dtype=dtype), key_like(matrix, size, kind)


def fresh_sketch(matrix: Tensor, size: int, kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sketch of a matrix by a fresh seed, and the key that S is made again from.

    Who traces sees one operator. Otherwise its parts run as they are, so that simulations see what they allocate.

    Args:
        matrix: (rows, d), of a float type.
        size: k, the rows of the sketch, below ``rows``.
        kind: What S is.
        dtype: The type to keep the sketch in.

    Returns:
        The sketch, (k, d) of ``dtype``, and the key, as of :func:`~actbench.codecs.sketch.compress`.

    Raises:
        KernelError: A CUDA graph is being captured, or the seed cannot be drawn.
    """
    return (_traced if traced() else _make)(matrix, size, kind, dtype)
