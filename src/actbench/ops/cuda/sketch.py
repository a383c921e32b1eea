"""Rows of random matrices on CUDA: the launches of ``kernels/sketch.cu``."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from actbench.ops import noise, rawkernel


def rows(seed: int, first_row: int, rows: int, dim: int, kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (rows, dim) entries of the matrix of a seed, from row ``first_row`` on.

    Args:
        seed: Any 64-bit integer.
        first_row: Index of the first row.
        rows: How many.
        dim: Columns.
        kind: ``rademacher`` or ``gaussian``.
        dtype: A float type. Those that no kernel writes are converted from float32.
        device: A CUDA device.

    Raises:
        KernelError: The kernel cannot be compiled or launched.
    """
    written = dtype if dtype in rawkernel.SCALARS else torch.float32
    out = torch.empty(rows, dim, dtype=written, device=device)
    place = (out, np.uint64(noise.mixed(seed)), np.int64(first_row * dim), np.int64(out.numel()))
    macros, groups = {"SCALAR": rawkernel.SCALARS[written]}, -(-out.numel() // 8)
    if kind == "rademacher":
        rawkernel.launch("sketch", "sketch_rademacher", macros, groups, *place)
    else:
        rawkernel.launch("sketch", "sketch_gaussian", macros, groups, _table(out.device), *place)
    return out.to(dtype)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Return the gaussian table on a device, 256 KiB that stay there."""
    from actbench.ops.sketch import gaussian_table

    return torch.from_numpy(gaussian_table()).to(device)
