"""Allocates the results of kernels where nothing sees operators (:func:`actbench.ops.library.is_watched`).

Torch's ``empty`` takes 5 µs of the host's time in a model. Most of that is the parser of its arguments and the
dispatcher, not the allocation. The code that inductor generates allocates by functions that have neither.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch._C
_on_cpu: Callable[..., Tensor] = _torch._dynamo.guards._empty_strided_cpu
_on_current_gpu: Callable[..., Tensor] = _torch._dynamo.guards._empty_strided_cuda


def allocator(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: tuple[int, ...] | None = None
) -> Callable[[], Tensor]:
    """Return a function that allocates tensors of a shape, with any values, on a CPU or CUDA device.

    They are contiguous, unless strides are given.
    """
    sizes = tuple(shape)
    if strides is None:
        # the stride of a dimension is the product of the sizes behind it, of which torch counts 0 as 1
        behind = itertools.accumulate((max(size, 1) for size in reversed(sizes[1:])), operator.mul, initial=1)
        strides = tuple(behind)[::-1] if sizes else ()
    if device.type == "cpu":
        return functools.partial(_on_cpu, sizes, strides, dtype)
    return functools.partial(_on_gpu, sizes, strides, dtype, device)


def _on_gpu(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.index == _torch._cuda_getDevice():
        return _on_current_gpu(sizes, strides, dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
