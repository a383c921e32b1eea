"""Pools that save neither their input nor 64-bit indices.

Max pooling packs the place of each maximum in its window. Average pooling packs nothing: its gradient depends on the
shape of the input alone. Output and gradient are torch's, bit for bit: torch's own operators compute them, and read
only shape and layout of the input. The backward operator of max pooling gets its indices back, a piece of the batch at
a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.methods.actnn.layers.geometry import Numbers, channels_last, numbers
from actbench.methods.actnn.layers.savedinput import needs_codes, packed, pieces, unpacked
from actbench.packing import savedtensors
from actbench.packing.layout import as_it_lay, in_order
from actbench.packing.refusals import first_order


@dataclass(frozen=True)
class Windows:
    """Windows that slide over a plane of one to three dimensions, with a number for each dimension.

    A place in a window is the number of its element in the kernel, row by row. Its offset is the distance of the
    element from the window's start in the flattened plane; both are zero for the first element. If a window is wider
    than the plane, two places may have the same offset, and both stand for the same element.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @classmethod
    def of(
        cls, dims: int, kernel_size: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers, ceil_mode: bool
    ) -> Windows:
        """Return the windows that torch's arguments describe: numbers for all dimensions, or for each."""
        kernel = numbers(kernel_size, dims)
        steps = numbers(stride, dims) or kernel
        return cls(kernel, steps, numbers(padding, dims), numbers(dilation, dims), ceil_mode)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of torch's operators."""
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode

    @property
    def bits(self) -> int:
        """Bits of a place, at least 1."""
        return max(1, (math.prod(self.kernel) - 1).bit_length())

    def fit(self, shape: Sequence[int]) -> bool:
        """Return whether places have at most 8 bits, and every window has an element of the input's plane."""
        dims = len(self.kernel)
        whole = all(len(of) == dims for of in (self.stride, self.padding, self.dilation))
        if not whole or len(shape) - dims not in (1, 2) or self.bits > 8:
            return False
        return all(step <= size for step, size in zip(self.dilation, shape[-dims:], strict=True))

    def reach(self, plane: Sequence[int]) -> int:
        """Return the greatest offset of a place, plus one."""
        sizes = zip(self.kernel, self.dilation, _strides(plane), strict=True)
        return 1 + sum((size - 1) * step * stride for size, step, stride in sizes)

    def offsets(self, plane: Sequence[int], device: torch.device) -> Tensor:
        """Return the offset of each place, int64 ``(places,)``."""
        places = torch.arange(math.prod(self.kernel), device=device)
        found = torch.zeros_like(places)
        along = zip(self.kernel, self.dilation, _strides(plane), _strides(self.kernel), strict=True)
        for size, step, stride, below in along:
            found += (places // below % size) * (step * stride)
        return found

    def starts(self, plane: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
        """Return the start of each window in the flattened plane, int64 of shape ``counts``; below 0 in the padding."""
        found = torch.zeros(*counts, dtype=torch.int64, device=device)
        for dim, (count, stride) in enumerate(zip(counts, _strides(plane), strict=True)):
            along = (torch.arange(count, device=device) * self.stride[dim] - self.padding[dim]) * stride
            found += along.view([-1 if other == dim else 1 for other in range(len(counts))])
        return found


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


aten = torch.ops.aten


class MaxPooled(torch.autograd.Function):
    """Max pooling over the last two or three dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: Windows) -> Tensor:
        """Return the maxima; save uint8 ``(ceil(maxima * windows.bits / 8),)``."""
        dims = len(windows.kernel)
        pool = aten.max_pool2d_with_indices if dims == 2 else aten.max_pool3d_with_indices
        output, indices = pool.default(x, *windows.arguments)
        maxima: Tensor = output
        ctx.windows, ctx.of, ctx.shape = windows, x.shape, maxima.shape
        ctx.order, ctx.out_order = _torch_order(x), _torch_order(indices)
        plane = x.shape[-dims:]
        offsets = windows.offsets(plane, x.device)
        place_at = offsets.new_zeros(windows.reach(plane), dtype=torch.uint8)
        place_at[offsets] = torch.arange(offsets.numel(), dtype=torch.uint8, device=x.device)
        # in place: indices take 8 bytes each
        indices.sub_(windows.starts(plane, maxima.shape[-dims:], x.device))
        places = place_at.index_select(0, in_order(indices, ctx.out_order).view(-1))
        codes = packed(places, windows.bits, None)
        savedtensors.packed(indices, codes)
        ctx.save_for_backward(codes)
        return maxima

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, at the maxima that torch found."""
        (codes,) = ctx.saved_tensors
        windows, dims = ctx.windows, len(ctx.windows.kernel)
        offsets = windows.offsets(ctx.of[-dims:], grad.device)
        starts = windows.starts(ctx.of[-dims:], ctx.shape[-dims:], grad.device)
        found = _blank(ctx.of, ctx.order, grad)
        row = ctx.shape[1:].numel()
        for first, last in pieces(ctx.shape[0], row):
            places = unpacked(codes, windows.bits, first * row, last * row)
            # index_select takes int32, which is half of int64
            indices = offsets.index_select(0, places.int())
            indices = _laid_out(indices, (last - first, *ctx.shape[1:]), ctx.out_order).add_(starts)
            _scatter(grad[first:last], indices, windows, found[first:last])
        return found, None


def _scatter(grad: Tensor, indices: Tensor, windows: Windows, found: Tensor) -> None:
    """Write the gradient of the input; torch does not read the input, so it gets the same memory as input."""
    if len(windows.kernel) == 2:
        write = aten.max_pool2d_with_indices_backward.grad_input
        write(grad, found, *windows.arguments, indices, grad_input=found)
    else:  # the layout of this operator's result depends on the device
        found.copy_(aten.max_pool3d_with_indices_backward.default(grad, found, *windows.arguments, indices))


def _torch_order(x: Tensor) -> list[int] | None:
    """Return the order of the dimensions in memory if it is torch's channels last, else None."""
    return None if channels_last(x) is None else [0, *range(2, x.dim()), 1]


def _blank(shape: Sequence[int], order: list[int] | None, like: Tensor) -> Tensor:
    """Return an empty tensor of a shape and memory order, with device and type of ``like``."""
    return _laid_out(like.new_empty(math.prod(shape)), shape, order)


def _laid_out(flat: Tensor, shape: Sequence[int], order: list[int] | None) -> Tensor:
    return as_it_lay(flat.view([shape[dim] for dim in order or range(len(shape))]), order)


def _pooled(function: type[torch.autograd.Function], dims: int, x: Tensor, *arguments: Any) -> Tensor:
    """Apply a function of planes; as in torch, a row is a plane, and autocast on the CPU widens 3d inputs of halves."""
    if dims == 1:
        x = x.unsqueeze(-2)
    elif dims == 3 and x.dtype in (torch.float16, torch.bfloat16) and x.is_cpu and torch.is_autocast_enabled("cpu"):
        x = x.float()
    found: Tensor = function.apply(x, *arguments)
    return found.squeeze(-2) if dims == 1 else found


def max_pool(
    dims: int,
    input: Tensor,  # noqa: A002  (torch's names for arguments)
    kernel_size: Numbers,
    stride: Numbers = None,
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Return ``F.max_pool1d`` to ``F.max_pool3d`` of the same arguments.

    For each maximum ``ceil(log2(elements of a window))`` bits are packed, at least 1. Torch's own function runs if a
    window has more than 256 elements or is dilated beyond the plane, or if the indices are part of the output.
    """
    exact: Callable[..., Any] = getattr(F, f"max_pool{dims}d")
    given = (kernel_size, stride, padding, dilation, ceil_mode)
    windows = None if return_indices or not needs_codes(input) else Windows.of(dims, *given)
    if windows is None or not windows.fit(input.shape):
        return exact(input, *given, return_indices)
    if dims == 1:
        sizes, steps, pads, gaps, _ = windows.arguments
        windows = Windows((1, *sizes), (1, *steps), (0, *pads), (1, *gaps), ceil_mode)
    return _pooled(MaxPooled, dims, input, windows)


class Averaged(torch.autograd.Function):
    """Average pooling over the last two or three dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, arguments: tuple[Any, ...]) -> Tensor:
        """Return the averages."""
        ctx.shape, ctx.dims, ctx.arguments = x.shape, dims, arguments
        ctx.order = _torch_order(x) if dims == 2 else None  # the layout of torch's gradient
        averages: Tensor = (aten.avg_pool2d if dims == 2 else aten.avg_pool3d).default(x, *arguments)
        return averages

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient; torch does not read the input's values, so it gets the result's memory as input."""
        found = _blank(ctx.shape, ctx.order, grad)
        write = aten.avg_pool2d_backward if ctx.dims == 2 else aten.avg_pool3d_backward
        write.grad_input(grad, found, *ctx.arguments, grad_input=found)
        return found, None, None


class AveragedTo(torch.autograd.Function):
    """Average pooling over the last two or three dimensions to an output of a given size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Sequence[int]) -> Tensor:
        """Return the averages."""
        ctx.shape, ctx.dims, ctx.order = x.shape, len(size), _torch_order(x)
        pool = aten._adaptive_avg_pool2d if len(size) == 2 else aten._adaptive_avg_pool3d
        averages: Tensor = pool.default(x, size)
        return averages

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient; torch reads only the layout of the input."""
        in_torch_order = ctx.dims == 2 and ctx.order is not None
        like = _blank(ctx.shape, ctx.order, grad) if in_torch_order else grad.new_zeros(()).expand(ctx.shape)
        spread = aten._adaptive_avg_pool2d_backward if ctx.dims == 2 else aten._adaptive_avg_pool3d_backward
        return spread.default(grad, like), None


def avg_pool(
    dims: int,
    input: Tensor,  # noqa: A002
    kernel_size: Numbers,
    stride: Numbers = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Return ``F.avg_pool1d`` to ``F.avg_pool3d``, of the same arguments."""
    exact: Callable[..., Tensor] = getattr(F, f"avg_pool{dims}d")
    divisor = () if dims == 1 and divisor_override is None else (divisor_override,)  # one dimension has no divisor
    if not needs_codes(input) or input.dim() - dims not in (1, 2) or (dims == 1 and divisor):
        return exact(input, kernel_size, stride, padding, ceil_mode, count_include_pad, *divisor)
    kernel = numbers(kernel_size, dims)
    steps, pads = numbers(stride, dims) or kernel, numbers(padding, dims)
    if dims == 1:
        kernel, steps, pads = (1, *kernel), (1, *steps), (0, *pads)
    arguments = (kernel, steps, pads, ceil_mode, count_include_pad, divisor_override)
    return _pooled(Averaged, dims, input, max(dims, 2), arguments)


def adaptive_avg_pool(dims: int, input: Tensor, output_size: Any) -> Tensor:  # noqa: A002
    """Return ``F.adaptive_avg_pool1d`` to ``F.adaptive_avg_pool3d``, of the same arguments."""
    exact: Callable[..., Tensor] = getattr(F, f"adaptive_avg_pool{dims}d")
    asked = numbers(output_size, dims) or (None,) * dims
    if not needs_codes(input) or input.dim() - dims not in (1, 2) or len(asked) != dims:
        return exact(input, output_size)
    sizes = zip(asked, input.shape[-dims:], strict=True)
    size = tuple(there if wanted is None else wanted for wanted, there in sizes)
    if all(each == 1 for each in size):
        return exact(input, output_size)  # a mean, for which torch saves nothing
    return _pooled(AveragedTo, dims, input, (1, *size) if dims == 1 else size)
