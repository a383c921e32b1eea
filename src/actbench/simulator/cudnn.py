"""What cuDNN's convolutions need in addition to their operands: copies in the layout in which tensor cores read them.

cuDNN tells nobody its choice of a kernel; these are the choices of cuDNN 9 on an H200, for ResNets and DenseNets in
float32 (which it computes in TF32). Kernels for tensor cores read images with channels last. Images in another layout,
or with a number of channels that does not fill 16 bytes, are copied with the weight and the output. A kernel of one
pixel without strides is a product of matrices, which needs no copy if planes are large.
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


def forward_bytes(profile: DeviceProfile, args: Any, result: Tensor) -> int:
    """Return the bytes of the temporaries of ``convolution``."""
    x, weight, _, stride, *_, groups = args
    if not _copies(profile, x, weight, groups) or _is_product(weight, stride, result, _LARGE_PLANE):
        return 0
    return _bytes(x) + _bytes(weight) + (0 if _is_last(x, weight) else _bytes(result))


def backward_bytes(profile: DeviceProfile, args: Any, result: Any) -> int:
    """Return the bytes of the temporaries of ``convolution_backward``."""
    grad, x, weight, _, stride, *_, groups, _ = args
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


def _is_last(*tensors: Tensor) -> bool:
    return any(not each.is_contiguous() and each.is_contiguous(memory_format=torch.channels_last) for each in tensors)


def _is_product(weight: Tensor, stride: list[int], output: Tensor, large_plane: int) -> bool:
    return max(*weight.shape[2:], *stride) == 1 and math.prod(output.shape[2:]) >= large_plane


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
