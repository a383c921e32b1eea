"""What operators allocate and free before they return: the part of a peak that no tracker of results sees.

Bytes are those of torch's kernels, without buffers of a few KiB per thread. Convolutions run in cuDNN (``cudnn.py``),
on the CPU in oneDNN (``onednn.py``), or unfold images there. A transposed convolution is the gradient of one by its
input, and the other way round. Both therefore have the same three peaks, each with its result: for the output, for the
gradient of the input, and for the gradient of the weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from actbench.simulator import ctc, cudnn, fourier, onednn, ownkernels, recurrent
from actbench.simulator.caching import round_up
from actbench.simulator.ownkernels import Formula, bytes_of, uncontiguous
from actbench.simulator.products import copied_bytes
from actbench.simulator.profiles import DeviceProfile
from actbench.simulator.reductions import Processors, buffer_bytes


def convolution(args: Any, result: Tensor) -> int:
    """Return the bytes of the temporaries of ``convolution``."""
    x, weight, _, stride, padding, dilation, transposed, _, groups = args
    if not _uses_onednn(x, weight, stride, dilation, groups):
        return _columns(result, weight, x) if transposed else _column_bytes(x, weight, result, stride)
    conv = _of_onednn(x, weight, result, stride, padding, dilation, groups, transposed)
    peak = onednn.image_peak(conv, transposed=True) if transposed else onednn.output_peak(conv)
    return peak - bytes_of(result) + _copied(x, weight)


def convolution_backward(args: Any, result: Any) -> int:
    """Return the bytes of the temporaries of ``convolution_backward``: the input's gradient, then the weight's."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = args
    copied = _copied(x, weight, grad)
    if not _uses_onednn(x, weight, stride, dilation, groups):
        return copied + (_columns(grad, weight, x) if transposed else _column_bytes(x, weight, grad, stride))
    conv = _of_onednn(x, weight, grad, stride, padding, dilation, groups, transposed)
    x_grad = bytes_of(x) if wanted[0] else 0
    w_grad = bytes_of(weight) if wanted[1] else 0
    of_input = of_weight = 0
    if wanted[0]:
        of_input = onednn.output_peak(conv) if transposed else onednn.image_peak(conv)
    if wanted[1]:
        of_weight = onednn.weight_peak(conv)
    # the peaks include the gradients, which count as results
    return copied + max(of_input, x_grad + of_weight) - x_grad - w_grad


def _of_onednn(
    x: Tensor,
    weight: Tensor,
    output: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    transposed: bool,
) -> onednn.Convolution:
    image, made = (output, x) if transposed else (x, output)
    last = _convolves_last(x, weight)
    return onednn.Convolution(image, weight, made, max(stride), max(padding), max(dilation), groups, last)


def _convolves_last(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch convolves with channels last: strides say so, of pointwise weights and of slices, too."""
    return any(each.dim() == 4 and suggest_memory_format(each) == torch.channels_last for each in (x, weight))


def _copied(x: Tensor, weight: Tensor, *others: Tensor) -> int:
    """Return the bytes of copies of operands that are not in the layout in which torch convolves."""
    layout = torch.channels_last if _convolves_last(x, weight) else torch.contiguous_format
    return sum(bytes_of(each) for each in (x, weight, *others) if not each.is_contiguous(memory_format=layout))


def _has_layout(tensor: Tensor, layout: torch.memory_format) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=layout)


def _uses_onednn(x: Tensor, weight: Tensor, stride: list[int], dilation: list[int], groups: int) -> bool:
    """Return whether torch chooses oneDNN; it convolves tiny single images with its own kernel."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not torch.backends.mkldnn.enabled or x.dtype == torch.float64:
        return False
    kernel = weight.shape[2:]
    # the conditions of use_mkldnn: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/Convolution.cpp
    plain = max(stride) == 1 and max(dilation) == 1 and max(kernel) == 1
    if plain and x.shape[0] < 16 and torch.get_num_threads() == 1:
        return False
    return groups > 1 or min(kernel[-2:]) > 3 or x.shape[0] > 1 or math.prod(x.shape[:4]) > 20480


def _column_bytes(x: Tensor, weight: Tensor, output: Tensor, stride: list[int]) -> int:
    if x.dim() < 5 and max(weight.shape[2:]) == 1 and max(stride) == 1:
        return 0  # a pointwise kernel reads the image itself, not the volume
    return _columns(x, weight, output)


def _columns(x: Tensor, weight: Tensor, output: Tensor) -> int:
    return x.shape[0] * math.prod(weight.shape[1:]) * math.prod(output.shape[2:]) * x.element_size()


aten = torch.ops.aten


def _layout_of(tensor: Tensor) -> torch.memory_format:
    is_last = tensor.is_contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else False
    return torch.channels_last if is_last and not tensor.is_contiguous() else torch.contiguous_format


def _batch_norm_backward(args: Any, result: Any) -> int:
    """The vectorised kernel makes a second gradient of the input; it needs both tensors in one layout."""
    grad, x = args[:2]
    both = grad.is_contiguous() and x.is_contiguous()
    both |= _has_layout(grad, torch.channels_last) and _has_layout(x, torch.channels_last)
    return bytes_of(x) if both else 0


def _pool_backward(args: Any, result: Tensor) -> int:
    """Kernels work in the layout of the output's gradient; the result, in that of the input, and indices are copied."""
    grad, *others = args
    layout = _layout_of(grad)
    indices = [each for each in others[1:] if isinstance(each, Tensor)]
    copied = [each for each in (result, *indices) if each.dim() == 4 and not _has_layout(each, layout)]
    return sum(map(bytes_of, copied)) + (0 if grad.dim() != 4 or _has_layout(grad, layout) else bytes_of(grad))


def _group_norm_backward(args: Any, result: Any) -> int:
    """Where the layouts of the output's gradient and the input differ, that gradient and the result are made twice."""
    grad, x = args[:2]
    sums: int = 2 * args[5] * args[6] * 4  # two for each channel of each image
    if grad.dim() != 4:
        return sums + uncontiguous(grad, x)
    return sums + (0 if _has_layout(grad, _layout_of(x)) else 2 * bytes_of(x))


# _use_vectorized_kernel_cond_2d of aten/src/ATen/native/cpu/UpSampleKernel.cpp
_SMALL_IMAGE = 128
"""Height and width of images, added, up to which upsampling runs with channels last."""


def _upsample(args: Any, result: Tensor) -> int:
    """Small images are copied to channels last, and their results back."""
    x: Tensor = args[0]
    is_small = sum(result.shape[-2:]) <= _SMALL_IMAGE
    return bytes_of(x) + bytes_of(result) if is_small and not _has_layout(x, torch.channels_last) else 0


def _trilinear(args: Any, result: Tensor) -> int:
    """``nn.Bilinear`` and its gradients multiply twice for each output feature; both products are alive at once."""
    operands, (first, second, third, summed) = args[:3], args[3:7]
    looped = args[7] if len(args) > 7 else 1
    shapes = [_with_ones(each.shape, added) for each, added in zip(operands, (first, second, third), strict=True)]
    outer = [max(sizes) for sizes in zip(*shapes[:2], strict=True)]
    inner = [1 if at == looped or (at in summed and at in third) else size for at, size in enumerate(outer)]
    whole = [max(sizes) for sizes in zip(*shapes, strict=True)]
    last = [1 if at == looped or at in summed else size for at, size in enumerate(whole)]
    return (math.prod(inner) + math.prod(last)) * result.element_size()


def _with_ones(shape: torch.Size, added: list[int]) -> list[int]:
    sizes = list(shape)
    for at in added:
        sizes.insert(at, 1)
    return sizes


def _sum(args: Any, result: Tensor) -> int:
    """A sum in another dtype is computed from a copy in that dtype; CUDA avoids the copy for half types."""
    # make_reduction of ATen/native/ReduceOpsUtils.h
    x: Tensor = args[0]
    return 0 if result.dtype == x.dtype else x.numel() * result.element_size()


def _sum_on_cuda(processors: Processors, args: Any, result: Tensor) -> int:
    x: Tensor = args[0]
    # gpu_lowp_to_f32 in make_reduction
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    copied = 0 if is_half and result.dtype == torch.float32 else _sum(args, result)
    asked = args[1] if len(args) > 1 else None
    over = {dim % x.dim() for dim in asked or range(x.dim())} if x.dim() else set()
    # sums of half types are added up in float32
    return copied + buffer_bytes(x, over, max(4, result.element_size()), processors)


def _safe_softmax(args: Any, result: Tensor) -> int:
    """One byte per score marks minus infinity, and one byte per row marks rows that are all minus infinity."""
    # masked and masked_rows of _safe_softmax in aten/src/ATen/native/transformers/attention.cpp
    return result.numel() + result.numel() // max(result.shape[-1], 1)


def _flash_attention_backward(args: Any, result: Any) -> int:
    """The gradient of the queries is summed in float32, in tiles of 128 rows; shared heads get one per query head."""
    _, query, key = args[:3]
    batch, heads, rows, width = query.shape
    # dq_accum and softmax_d of mha_bwd: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp
    tiled: int = batch * heads * round_up(rows, 128)
    shared: int = 2 * bytes_of(key) // key.shape[1] * heads if key.shape[1] != heads else 0
    # mha_bwd rounds the width of heads up to a multiple of 32
    return tiled * round_up(width, 32) * 4 + tiled * 4 + shared


def _efficient_attention_backward(args: Any, result: Any) -> int:
    """Row sums of gradient times output; float32 needs the whole product for them, half types sum in float32."""
    query: Tensor = args[1]
    return query.numel() * 4 + query.numel() // query.shape[-1] * 4


def _reduced(args: Any, result: Tensor) -> int:
    """A loss of one number is the sum or mean of one for each element."""
    return 0 if result.dim() else max(bytes_of(each) for each in args[:2])


def _softmax_backward(args: Any, result: Tensor) -> int:
    """The product of the gradient and the output is made before it is summed."""
    # softmax_backward_cuda_out of aten/src/ATen/native/cuda/SoftMax.cu
    grad, output = args[:2]
    size: int = grad.numel() * max(grad.element_size(), output.element_size())
    return size


def _input_copied(args: Any, result: Any) -> int:
    return uncontiguous(args[0])


def _layer_norm_backward(args: Any, result: Any) -> int:
    return uncontiguous(*args[:2])


# should_use_small_sort of Sort.cpp in aten/src/ATen/native/cuda, and the segments of SortStable.cu
_SHORT_ROW, _MANY_ROWS, _PLACE_BYTES = 4096, 128, 8


def _rows_sorted(args: Any, result: Any) -> int:
    """Many long rows are sorted by CUB: their places the other way round, and values and places a second time.

    Short rows are sorted in the result. What few long rows take was not read, and does not count.
    """
    x: Tensor = args[0]
    dim = args[1] if len(args) > 1 and type(args[1]) is int else -1
    length = x.shape[dim] if x.dim() else 1
    is_by_cub = length > _SHORT_ROW and x.numel() // length >= _MANY_ROWS
    return bytes_of(x) + 2 * x.numel() * _PLACE_BYTES if is_by_cub and x.stride(dim) == 1 else 0


_BOTH: Mapping[Any, Formula] = {
    **ownkernels.EVERYWHERE,
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), _reduced),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _input_copied),
    **dict.fromkeys(ctc.GRADIENTS, ctc.backward_bytes),
    aten._safe_softmax.default: _safe_softmax,
    aten._trilinear.default: _trilinear,
}

_CPU: Mapping[Any, Formula] = {
    **_BOTH,
    **ownkernels.ON_CPU,
    **dict.fromkeys((aten.mm.default, aten.addmm.default), copied_bytes),
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.max_pool2d_with_indices_backward.default: _pool_backward,
    aten.avg_pool2d_backward.default: _pool_backward,
    aten._adaptive_avg_pool2d_backward.default: _pool_backward,
    aten.upsample_nearest2d.default: _upsample,
    aten._upsample_nearest_exact2d.default: _upsample,
    aten.upsample_bilinear2d.default: _upsample,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    **dict.fromkeys((aten._fft_c2c.default, aten._fft_r2c.default), fourier.transform),
    aten._fft_c2r.default: fourier.to_real,
}

_CUDA: Mapping[Any, Formula] = {
    **_BOTH,
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), copied_bytes),
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _rows_sorted),
    # measured on an H200, as are the copies of layer norms (docs/decisions/0034)
    aten._softmax_backward_data.default: _softmax_backward,
    aten.native_layer_norm.default: _input_copied,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _input_copied,
    aten._fused_rms_norm_backward.default: _layer_norm_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
}


def _look_up(table: Mapping[Any, Formula], func: Any, args: tuple[Any, ...], result: Any) -> int:
    formula = table.get(func) or ownkernels.of_own(func)
    return 0 if formula is None else formula(args, result)


cpu = functools.partial(_look_up, _CPU)
"""Return the bytes of an operator's temporaries on the CPU, from the operator, its arguments and its result."""


def cuda(profile: DeviceProfile) -> Callable[[Any, tuple[Any, ...], Any], int]:
    """Return a function like :func:`cpu` for a CUDA device."""
    of_sum = functools.partial(_sum_on_cuda, profile.processors)
    libraries = {
        aten.convolution.default: functools.partial(cudnn.forward_bytes, profile),
        aten.convolution_backward.default: functools.partial(cudnn.backward_bytes, profile),
        recurrent.FORWARD.default: functools.partial(recurrent.forward_bytes, profile),
        recurrent.BACKWARD.default: functools.partial(recurrent.backward_bytes, profile),
    }
    sums = dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), of_sum)
    return functools.partial(_look_up, {**_CUDA, **sums, **libraries})
