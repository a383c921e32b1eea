"""What sketches are computed in, and how much of a matrix at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.units import MIB

CHUNK_BYTES = 2 * MIB


def working_type(matrix: Tensor) -> torch.dtype:
    """Return float64 for a float64 matrix and float32, the type sketches are summed in, for all others."""
    return torch.float64 if matrix.dtype == torch.float64 else torch.float32
