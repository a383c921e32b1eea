"""What MKL's Fourier transforms copy on a CPU, as torch 2.15 calls them.

Dimensions that are not transformed become one, in the order of their strides: where they cannot, the input is copied.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actbench.simulator.ownkernels import bytes_of


def transform(args: Any, result: Tensor) -> int:
    """Return the bytes of the temporaries of ``_fft_c2c`` and ``_fft_r2c``."""
    x, dims = args[:2]
    return bytes_of(x) if dims and _is_copied(x.shape, x.stride(), dims) else 0


def to_real(args: Any, result: Tensor) -> int:
    """Return the bytes of the temporaries of ``_fft_c2r``: all but the last dimension are transformed first, apart."""
    x, (*others, last) = args[:2]
    # _fft_c2r_mkl of aten/src/ATen/native/mkl/SpectralOps.cpp
    if not others:
        return transform((x, [last]), result)
    between = _strides_of_result(x.shape, x.stride(), others)
    copied = bytes_of(x) if _is_copied(x.shape, between, [last]) else 0
    return bytes_of(x) + max(transform((x, others), result) - bytes_of(result), copied)


def _order(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return the dimensions that are not transformed, outermost first."""
    transformed = {dim % len(shape) for dim in dims}
    return sorted(set(range(len(shape))) - transformed, key=lambda dim: -strides[dim])


def _is_copied(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> bool:
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False  # PocketFFT reads any strides
    order = [dim for dim in _order(shape, strides, dims) if shape[dim] > 1]
    return any(strides[one] != strides[next_] * shape[next_] for one, next_ in itertools.pairwise(order))


def _strides_of_result(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return the strides of what MKL writes: transformed dimensions are innermost, in the order of their strides."""
    # as _sort_dims of aten/src/ATen/native/mkl/SpectralOps.cpp
    by_stride = sorted((dim % len(shape) for dim in dims), key=lambda dim: -strides[dim])
    order = [*_order(shape, strides, dims), *by_stride]
    made = dict(zip(order, (math.prod(shape[dim] for dim in order[at + 1 :]) for at in range(len(order))), strict=True))
    return [made[dim] for dim in range(len(shape))]
