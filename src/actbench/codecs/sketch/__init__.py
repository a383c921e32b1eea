"""Random sketches of a matrix: a few combinations of its rows that estimate products without bias.

With S of k rows and E[S^T S] = I, the sketches of X and Y alone give (S Y)^T (S X), an unbiased estimate of Y^T X
(Bershatsky et al., "Memory-Efficient Backpropagation through Large Linear Layers", arXiv 2201.13195, eq. 3). S is never
stored: :func:`compress` returns the sketch of X and a key, and :func:`project` makes S again for Y from the key.
"""

from __future__ import annotations

from actbench.codecs.sketch.sketching import (
    KINDS,
    Kind,
    Sketching,
    batch_variance,
    compress,
    fresh_sketch,
    project,
    variance,
)

__all__ = ["KINDS", "Kind", "Sketching", "batch_variance", "compress", "fresh_sketch", "project", "variance"]
