"""What operators allocate and free before they return: the part of a peak that no tracker of results sees.

Bytes are those of torch's kernels, without the workspaces of libraries (cuBLAS, cuDNN) and buffers of a few KiB per
thread. Convolutions on the CPU make blocked copies (oneDNN) or columns. A transposed convolution is the gradient of a
convolution with respect to its input, and the other way round. Both therefore have the same three peaks, each with its
result: for the output, for the gradient of the input, and for the gradient of the weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from actbench.measuring.meters.caching import round_up

_ONEDNN_BLOCK = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
"""Channels in one block of oneDNN's layouts, a register of floats; inputs with fewer channels are not copied."""

_ONEDNN_WIDEST_KERNEL = 14
"""Wider kernels, such as those that cut images into patches, run as a matrix multiplication."""


def convolution(args: Any, result: Tensor) -> int:
    """Return the bytes of the temporaries of ``convolution``."""
    x, weight, _, stride, _, dilation, transposed, _, groups = args
    if not _uses_onednn(x, weight, stride, dilation, groups):
        return _columns(result, weight, x) if transposed else _column_bytes(x, weight, result, stride)
    if _is_channels_last(x) or _is_channels_last(weight):
        return 2 * _bytes(weight)
    make = _of_input(x, result, weight, stride, groups) if transposed else _of_output(x, weight, result, stride)
    return make - _bytes(result) + _copied(x)


def convolution_backward(args: Any, result: Any) -> int:
    """Return the bytes of the temporaries of ``convolution_backward``: the input's gradient, then the weight's."""
    grad, x, weight, _, stride, _, dilation, transposed, _, groups, wanted = args
    copied = _copied(x) + _copied(grad)
    if not _uses_onednn(x, weight, stride, dilation, groups):
        return copied + (0 if transposed else _column_bytes(x, weight, grad, stride))
    if _is_channels_last(x) or _is_channels_last(weight):
        return copied + (3 if wanted[1] else 2) * _bytes(weight)
    x_grad = _bytes(x) if wanted[0] else 0
    w_grad = _bytes(weight) if wanted[1] else 0
    output, image = (x, grad) if transposed else (grad, x)
    of_input = of_weight = 0
    if wanted[0] and transposed:
        of_input = _of_output(grad, weight, x, stride)
    elif wanted[0]:
        of_input = _of_input(grad, x, weight, stride, groups)
    if wanted[1]:
        copies = _weight_gradient_copies(output, image, weight, groups) + _strided_bytes(image, weight, output, stride)
        of_weight = w_grad + max(copies, w_grad)
    return copied + max(of_input, x_grad + of_weight) - x_grad - w_grad


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _of_output(x: Tensor, weight: Tensor, output: Tensor, stride: list[int]) -> int:
    """Blocked copies of input and weight, and oneDNN's blocked result, which is copied into the plain one."""
    copies = _blocked_input_bytes(x) + _bytes(weight) + _strided_bytes(x, weight, output, stride)
    return _blocked_bytes(output) + max(copies, _bytes(output))


def _of_input(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], groups: int) -> int:
    """The same from output to input; with strides channels are not padded, and a second plain result is made."""
    channels = weight.shape[1]
    blocks = _bytes(weight) // channels * round_up(channels, _ONEDNN_BLOCK if groups == 1 else 1)
    if max(stride) > 1 and (groups == 1 or channels >= _ONEDNN_BLOCK):
        return _bytes(x) + max(_bytes(grad) + blocks, 2 * _bytes(x))
    return _blocked_bytes(x) + max(_blocked_bytes(grad) + blocks, _bytes(x))


def _weight_gradient_copies(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> int:
    """Blocked copies of both operands; for wide kernels, each thread's image columns and sums of weight gradients.

    On AVX2, kernels higher than the image count as wide.
    """
    widest, channels = max(weight.shape[2:]), weight.shape[1]
    if groups > 1 and (widest > 3 if channels == 1 else channels < 8):
        return 0  # the operands are not copied
    is_low = _ONEDNN_BLOCK == 8 and x.dim() > 3 and x.shape[-2] < weight.shape[-2]
    if widest <= _ONEDNN_WIDEST_KERNEL and not is_low:
        return _blocked_bytes(grad) + _blocked_input_bytes(x)
    columns = math.prod(weight.shape[1:]) * math.prod(grad.shape[2:]) * x.element_size()
    return min(torch.get_num_threads(), x.shape[0]) * (4 * _bytes(weight) + columns)


def _copied(tensor: Tensor) -> int:
    """Return the bytes of the copy of a tensor that is not dense."""
    return 0 if tensor.is_contiguous() or _is_channels_last(tensor) else _bytes(tensor)


def _uses_onednn(x: Tensor, weight: Tensor, stride: list[int], dilation: list[int], groups: int) -> bool:
    """Return whether torch chooses oneDNN; it convolves tiny single images with its own kernel."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not torch.backends.mkldnn.enabled or x.dtype == torch.float64:
        return False
    kernel = weight.shape[2:]
    plain = max(stride) == 1 and max(dilation) == 1 and max(kernel) == 1
    if plain and x.shape[0] < 16 and torch.get_num_threads() == 1:
        return False
    return groups > 1 or min(kernel[-2:]) > 3 or x.shape[0] > 1 or x.numel() > 20480


def _column_bytes(x: Tensor, weight: Tensor, output: Tensor, stride: list[int]) -> int:
    if max(weight.shape[2:]) == 1 and max(stride) == 1:
        return 0  # a pointwise kernel reads the image itself
    return _columns(x, weight, output)


def _columns(x: Tensor, weight: Tensor, output: Tensor) -> int:
    return x.shape[0] * math.prod(weight.shape[1:]) * math.prod(output.shape[2:]) * x.element_size()


def _strided_bytes(x: Tensor, weight: Tensor, output: Tensor, stride: list[int]) -> int:
    """Return the bytes that each thread of a strided pointwise kernel gathers from an image."""
    if max(weight.shape[2:]) > 1 or max(stride) == 1:
        return 0
    return torch.get_num_threads() * x.shape[1] * math.prod(output.shape[2:]) * x.element_size()


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _blocked_bytes(x: Tensor) -> int:
    return _bytes(x) // max(x.shape[1], 1) * round_up(x.shape[1], _ONEDNN_BLOCK)


def _blocked_input_bytes(x: Tensor) -> int:
    return 0 if x.shape[1] < _ONEDNN_BLOCK else _blocked_bytes(x)


aten = torch.ops.aten

Formula = Callable[[Any, Any], int]
"""From an operator's arguments and its result to the bytes of its temporaries."""


def _batch_norm_backward(args: Any, result: Any) -> int:
    """The vectorised kernel makes a second gradient of the input; it needs both tensors in one layout."""
    grad, x = args[:2]
    for layout in (torch.contiguous_format, torch.channels_last):
        if x.dim() == 4 and grad.is_contiguous(memory_format=layout) and x.is_contiguous(memory_format=layout):
            return _bytes(x)
    return 0


def _sum(args: Any, result: Tensor) -> int:
    """A sum in another dtype is computed from a copy in that dtype; CUDA avoids the copy for half types."""
    x: Tensor = args[0]
    return 0 if result.dtype == x.dtype else x.numel() * result.element_size()


def _sum_on_cuda(args: Any, result: Tensor) -> int:
    is_half = args[0].dtype in (torch.float16, torch.bfloat16)
    return 0 if is_half and result.dtype == torch.float32 else _sum(args, result)


def _safe_softmax(args: Any, result: Tensor) -> int:
    """One byte per score marks minus infinity, and one byte per row marks rows that are all minus infinity."""
    return result.numel() + result.numel() // max(result.shape[-1], 1)


def _flash_attention_backward(args: Any, result: Any) -> int:
    """The gradient of the queries is summed in float32, in tiles of 128 rows; shared heads get one per query head."""
    _, query, key = args[:3]
    batch, heads, rows, width = query.shape
    tiled: int = batch * heads * round_up(rows, 128)
    shared: int = 2 * _bytes(key) // key.shape[1] * heads if key.shape[1] != heads else 0
    return tiled * round_up(width, 32) * 4 + tiled * 4 + shared


def _efficient_attention_backward(args: Any, result: Any) -> int:
    """Row sums of gradient times output; float32 needs the whole product for them, half types sum in float32."""
    query: Tensor = args[1]
    return query.numel() * 4 + query.numel() // query.shape[-1] * 4


_CPU: Mapping[Any, Formula] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
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


def _look_up(table: Mapping[Any, Formula], func: Any, args: tuple[Any, ...], result: Any) -> int:
    formula = table.get(func)
    return 0 if formula is None else formula(args, result)


cpu, cuda = functools.partial(_look_up, _CPU), functools.partial(_look_up, _CUDA)
"""Return the bytes of an operator's temporaries on a device, from the operator, its arguments and its result."""
