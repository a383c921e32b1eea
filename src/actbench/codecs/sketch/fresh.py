"""Sketches by a seed of their own, drawn and used in one operator.

A compiler that sees two operators, one that draws a seed and one that makes a sketch by it, may keep the sketch of the
forward pass and draw again in the backward pass, where the new seed makes another matrix S: the estimate is then noise.
The tag ``nondeterministic_seeded`` does not prevent it. One operator that gives both gives them of one draw, in
whichever pass it runs. It has not that tag, so that a compiler may make one of two sketches of one input, as layers do
that are not compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.codecs.sketch.sketching import Kind, compress, key_like
from actbench.ops.library import EVERYWHERE, HOST_NUMBER, define, traced
from actbench.ops.seeds import fresh_seed


def _make(matrix: Tensor, size: int, kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    sketch, key = compress(matrix, fresh_seed(), size, kind)
    return sketch.to(dtype), key


def _fake(matrix: Tensor, size: int, kind: Kind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return matrix.new_empty(size, matrix.shape[1], dtype=dtype), key_like(matrix, size, kind)


define(
    "fresh_sketch(Tensor matrix, SymInt size, str kind, ScalarType dtype) -> (Tensor sketch, Tensor key)",
    {EVERYWHERE: _make},
    _fake,
    tags=HOST_NUMBER,
)


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
    if traced():
        found: tuple[Tensor, Tensor] = torch.ops.actbench.fresh_sketch.default(matrix, size, kind, dtype)
        return found
    return _make(matrix, size, kind, dtype)
