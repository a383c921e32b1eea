"""What a finished model is scored by, from what it said of all samples."""

from __future__ import annotations

import torch
from torch import Tensor


def f1(predicted: Tensor, labels: Tensor) -> float:
    """Return the harmonic mean of precision and recall of class 1; 0 where neither holds that class.

    Args:
        predicted: Classes (n,), int64.
        labels: Classes (n,), int64.
    """
    hits = int(((predicted == 1) & (labels == 1)).sum())
    claimed = int((predicted == 1).sum()) + int((labels == 1).sum())
    return 2 * hits / claimed if claimed else 0.0


def correlation(predicted: Tensor, labels: Tensor) -> float:
    """Return the mean of Pearson's and Spearman's correlation, as STS-B is scored (Wang et al. 2018, arXiv 1804.07461).

    Args:
        predicted: Numbers (n,), floating point.
        labels: Numbers (n,), floating point.

    Returns:
        From -1 to 1; NaN where one of them has the same value throughout.
    """
    return (_pearson(predicted, labels) + _pearson(_ranks(predicted), _ranks(labels))) / 2


def _pearson(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


def _ranks(x: Tensor) -> Tensor:
    """Return ranks from 1; equal values share the mean of theirs."""
    _, places, counts = torch.unique(x, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts - 1) / 2
    return ranks[places]
