"""Splits float32 numbers into pairs of bfloat16 ones, whose products with signs matrix units compute exactly.

A bfloat16 number has 8 of the 24 bits of a float32 one. The nearest to x, and the nearest to what it leaves of x, are
together x within 2**-17 of it. The product of each with +1 or -1 is exact, and the units add products in float32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actbench.ops import rawkernel
from actbench.ops.library import check_contiguous, define


def reference(x: Tensor, scale: float) -> Tensor:
    """Do what :func:`sketch_halves` does, in plain torch; the kernel must agree bit for bit."""
    _check(x)
    scaled = x * scale
    high = scaled.bfloat16()
    return torch.cat((high, (scaled - high).bfloat16()))


def launch(x: Tensor, scale: float) -> Tensor:
    """Return the halves from ``kernels/sketch.cu``."""
    _check(x)
    out = _like(x)
    arguments = (x, out, np.float32(scale), np.int64(x.numel()))
    rawkernel.launch("sketch", "sketch_halves", {"SCALAR": "BFloat16"}, -(-x.numel() // 8), *arguments)
    return out


def _check(x: Tensor) -> None:
    check_contiguous(x)
    if x.dtype != torch.float32 or x.dim() != 2:
        raise ValueError(f"halves are made of a float32 matrix, found {x.dtype} {tuple(x.shape)}")


def _like(x: Tensor) -> Tensor:
    return x.new_empty(2 * x.shape[0], x.shape[1], dtype=torch.bfloat16)


@define("sketch_halves(Tensor x, float scale) -> Tensor", {"CPU": reference, "CUDA": launch})
def sketch_halves(x: Tensor, scale: float) -> Tensor:
    """Return the nearest bfloat16 numbers of x * scale, and below them the nearest of what these leave.

    x is a contiguous float32 matrix (n, d), the result (2 n, d).
    """
    _check(x)
    return _like(x)
