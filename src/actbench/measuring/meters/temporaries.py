"""What operators allocate and free before they return: the part of a peak that no ledger of results can see.

Bytes are those of torch's kernels. Left out are the libraries' workspaces (cuBLAS, cuDNN) and what depends on the
processor (scratch buffers of oneDNN, buffers of a few KiB per thread).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from actbench.measuring.meters import convolutions
from actbench.measuring.meters.ledger import round_up

aten = torch.ops.aten

Formula = Callable[[Any, Any], int]
"""From an operator's arguments and its result to the bytes of its temporaries."""


def cpu(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return the bytes of an operator's temporaries on the CPU."""
    return _look_up(_CPU, func, args, result)


def cuda(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return the bytes of an operator's temporaries on a CUDA device."""
    return _look_up(_CUDA, func, args, result)


def _look_up(table: Mapping[Any, Formula], func: Any, args: tuple[Any, ...], result: Any) -> int:
    formula = table.get(func)
    return 0 if formula is None else formula(args, result)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _batch_norm_backward(args: Any, result: Any) -> int:
    """The vectorised kernel makes a second gradient of the input; it needs both tensors in one layout."""
    grad, x = args[:2]
    for layout in (torch.contiguous_format, torch.channels_last):
        if x.dim() == 4 and grad.is_contiguous(memory_format=layout) and x.is_contiguous(memory_format=layout):
            return _bytes(x)
    return 0


def _sum(args: Any, result: Tensor) -> int:
    """A sum in another type than that of what is summed is made of a copy in that type; truth values are counted so.

    CUDA alone widens halves as it reads them.
    """
    x: Tensor = args[0]
    return 0 if result.dtype == x.dtype else x.numel() * result.element_size()


def _sum_on_cuda(args: Any, result: Tensor) -> int:
    is_half = args[0].dtype in (torch.float16, torch.bfloat16)
    return 0 if is_half and result.dtype == torch.float32 else _sum(args, result)


def _safe_softmax(args: Any, result: Tensor) -> int:
    """A byte per score says which are minus infinity, and one per row whether all are."""
    return result.numel() + result.numel() // max(result.shape[-1], 1)


def _flash_attention_backward(args: Any, result: Any) -> int:
    """The gradient of the queries is summed in float32, in tiles of 128 rows; shared heads get a gradient each."""
    _, query, key = args[:3]
    batch, heads, rows, width = query.shape
    tiled: int = batch * heads * round_up(rows, 128)
    shared: int = 2 * _bytes(key) // key.shape[1] * heads if key.shape[1] != heads else 0
    return tiled * round_up(width, 32) * 4 + tiled * 4 + shared


def _efficient_attention_backward(args: Any, result: Any) -> int:
    """Row sums of gradient times output, which float32 makes from the whole product; halves sum in float32."""
    query: Tensor = args[1]
    return query.numel() * 4 + query.numel() // query.shape[-1] * 4


_CPU: Mapping[Any, Formula] = {
    aten.convolution.default: convolutions.forward,
    aten.convolution_backward.default: convolutions.backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
}

_CUDA: Mapping[Any, Formula] = {
    aten.sum.default: _sum_on_cuda,
    aten.sum.dim_IntList: _sum_on_cuda,
    aten._safe_softmax.default: _safe_softmax,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
}
