"""What cuDNN's convolutions need in addition to their operands: copies for tensor cores, or transformed tiles.

cuDNN does not report which kernel it chose; these are the choices of cuDNN 9 on an H200, for ResNets and DenseNets in
float32 (which it computes in TF32). Kernels for tensor cores read images with channels last. Images in another layout,
or with a number of channels that does not fill 16 bytes, are copied with the weight and the output. A kernel of one
pixel without strides is a product of matrices, which needs no copy if planes are large.

On cards without TF32, kernels of 3x3 pixels without strides are Winograd's (Lavin and Gray, arXiv 1509.09308): image,
weight and output are transformed as wholes, each tile of 4x4 pixels of the output to 6x6 numbers, and multiplied. That
is read off published peaks of a V100 (docs/published-peaks.md), whose excess over tensors is this, to 1 %.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from actbench.simulator.profiles import DeviceProfile

_LARGE_PLANE, _LARGE_PLANE_BACKWARD = 14 * 14, 28 * 28
"""Pixels of an output from which products of matrices run without copies."""

_VECTOR_BYTES = 16

_TILE, _TRANSFORMED = 4, 6
"""Pixels of a side of a tile of the output, and numbers of a side of what it is transformed to."""

_FEW = 32
"""Channels of image or output below which tiles are not transformed: peaks of UNets with 16 are below that."""


def forward_bytes(profile: DeviceProfile, args: Any, result: Tensor) -> int:
    """Return the bytes of the temporaries of ``convolution``."""
    x, weight, _, stride, _, dilation, *_, groups = args
    if _is_winograd(profile, x, weight, stride, dilation, groups):
        return _transformed_bytes(weight, result)
    if not _copies(profile, x, weight, groups) or _is_product(weight, stride, result, _LARGE_PLANE):
        return 0
    return _bytes(x) + _bytes(weight) + (0 if _is_last(x, weight) else _bytes(result))


def backward_bytes(profile: DeviceProfile, args: Any, result: Any) -> int:
    """Return the bytes of the temporaries of ``convolution_backward``."""
    grad, x, weight, _, stride, _, dilation, *_, groups, _ = args
    if _is_winograd(profile, x, weight, stride, dilation, groups):
        return _transformed_bytes(weight, grad)
    if not _copies(profile, x, weight, groups) or _is_product(weight, stride, grad, _LARGE_PLANE_BACKWARD):
        return 0
    return _bytes(x) + _bytes(weight) + _bytes(grad)


def _copies(profile: DeviceProfile, x: Tensor, weight: Tensor, groups: int) -> bool:
    """Return whether tensor cores convolve, from copies; torch's own kernels convolve each channel by itself."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    if not profile.workspaces or x.dim() != 4 or not (half or (x.dtype == torch.float32 and profile.has_tensor_float)):
        return False
    fills = all(size * x.element_size() % _VECTOR_BYTES == 0 for size in weight.shape[:2])
    return groups < max(weight.shape[0], 2) and not (_is_last(x, weight) and fills)


def _is_winograd(
    profile: DeviceProfile, x: Tensor, weight: Tensor, stride: list[int], dilation: list[int], groups: int
) -> bool:
    """Return whether tiles are transformed: float32 without tensor cores, 3x3 pixels, all channels together."""
    if not profile.workspaces or profile.has_tensor_float or x.dtype != torch.float32:
        return False
    if min(weight.shape[:2]) < _FEW:
        return False
    return list(weight.shape[2:]) == [3, 3] and groups == 1 and all(each == 1 for each in (*stride, *dilation))


def _transformed_bytes(weight: Tensor, output: Tensor) -> int:
    """Return the bytes of image, weight and output, transformed."""
    outputs, inputs = weight.shape[:2]
    images, _, height, width = output.shape
    tiles = images * math.ceil(height / _TILE) * math.ceil(width / _TILE)
    return _TRANSFORMED**2 * (tiles * (inputs + outputs) + inputs * outputs) * output.element_size()


def _is_last(*tensors: Tensor) -> bool:
    return any(not each.is_contiguous() and each.is_contiguous(memory_format=torch.channels_last) for each in tensors)


def _is_product(weight: Tensor, stride: list[int], output: Tensor, large_plane: int) -> bool:
    return max(*weight.shape[2:], *stride) == 1 and math.prod(output.shape[2:]) >= large_plane


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
