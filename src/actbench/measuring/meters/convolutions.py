"""What torch's convolutions on the CPU allocate and free before they return: oneDNN's blocked copies, and columns.

A transposed convolution is the gradient of a convolution from its output to its input, and the other way round, so that
the same three things are counted for both: what it takes to make an output, the gradient of an input, and that of a
weight. Each is a peak that has the result in it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from actbench.measuring.meters.ledger import round_up

_ONEDNN_BLOCK = 16
"""Channels in one block of oneDNN's layouts; inputs with fewer channels are read as they are."""

_ONEDNN_WIDEST_KERNEL = 14
"""Kernels wider than this, such as those that cut images into patches, go through a matrix multiplication."""


def forward(args: Any, result: Tensor) -> int:
    """Return the bytes of the temporaries of ``convolution``."""
    x, weight, _, stride, _, dilation, transposed, _, groups = args
    if not _uses_onednn(x, weight, stride, dilation, groups):
        return _columns(result, weight, x) if transposed else _column_bytes(x, weight, result, stride)
    if _is_channels_last(x) or _is_channels_last(weight):
        return 2 * _bytes(weight)
    make = _of_input(x, result, weight, stride, groups) if transposed else _of_output(x, weight, result, stride)
    return make - _bytes(result) + _copied(x)


def backward(args: Any, result: Any) -> int:
    """Return the bytes of the temporaries of ``convolution_backward``: of the input's gradient, then the weight's."""
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
    """Blocked copies of input and weight, and the blocked result of oneDNN, from which the plain one is copied."""
    copies = _blocked_input_bytes(x) + _bytes(weight) + _strided_bytes(x, weight, output, stride)
    return _blocked_bytes(output) + max(copies, _bytes(output))


def _of_input(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], groups: int) -> int:
    """The same from output to input; of strides no channels are filled up, and a second plain result is made."""
    channels = weight.shape[1]
    blocks = _bytes(weight) // channels * round_up(channels, _ONEDNN_BLOCK if groups == 1 else 1)
    if max(stride) > 1 and (groups == 1 or channels >= _ONEDNN_BLOCK):
        return _bytes(x) + max(_bytes(grad) + blocks, 2 * _bytes(x))
    return _blocked_bytes(x) + max(_blocked_bytes(grad) + blocks, _bytes(x))


def _weight_gradient_copies(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> int:
    """Blocked copies of both operands; for wide kernels, each thread's image columns and sums of weight gradients."""
    widest, channels = max(weight.shape[2:]), weight.shape[1]
    if groups > 1 and (widest > 3 if channels == 1 else channels < 8):
        return 0  # read as they are
    if widest <= _ONEDNN_WIDEST_KERNEL:
        return _blocked_bytes(grad) + _blocked_input_bytes(x)
    columns = math.prod(weight.shape[1:]) * math.prod(grad.shape[2:]) * x.element_size()
    return min(torch.get_num_threads(), x.shape[0]) * (4 * _bytes(weight) + columns)


def _copied(tensor: Tensor) -> int:
    """Return the bytes of the copy that is made of a tensor with gaps or repeats, such as one value seen everywhere."""
    return 0 if tensor.is_contiguous() or _is_channels_last(tensor) else _bytes(tensor)


def _uses_onednn(x: Tensor, weight: Tensor, stride: list[int], dilation: list[int], groups: int) -> bool:
    """Follow torch's choice: tiny single images are convolved by its own kernel."""
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
    """Return what a pointwise kernel gathers of an image before it runs without strides, in each thread."""
    if max(weight.shape[2:]) > 1 or max(stride) == 1:
        return 0
    return torch.get_num_threads() * x.shape[1] * math.prod(output.shape[2:]) * x.element_size()


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _blocked_bytes(x: Tensor) -> int:
    return _bytes(x) // max(x.shape[1], 1) * round_up(x.shape[1], _ONEDNN_BLOCK)


def _blocked_input_bytes(x: Tensor) -> int:
    return 0 if x.shape[1] < _ONEDNN_BLOCK else _blocked_bytes(x)
