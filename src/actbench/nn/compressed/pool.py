"""Max pooling that packs the place of each maximum in its window, in place of its input and of 64-bit indices.

Output and gradient are torch's, bit for bit: torch's own operator gets its indices back, a piece of the batch at a
time. It reads only shape and layout of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.nn import savedtensors
from actbench.nn.compressed.geometry import Numbers, channels_last, numbers
from actbench.nn.compressed.savedinput import needs_codes, packed, pieces, unpacked
from actbench.nn.layout import as_it_lay, in_order
from actbench.nn.refusals import first_order


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
        return (
            whole
            and len(shape) - dims in (1, 2)
            and self.bits <= 8
            and all(step <= size for step, size in zip(self.dilation, shape[-dims:], strict=True))
        )

    def reach(self, plane: Sequence[int]) -> int:
        """Return the greatest offset of a place, plus one."""
        sizes = zip(self.kernel, self.dilation, _strides(plane), strict=True)
        return 1 + sum((size - 1) * step * stride for size, step, stride in sizes)

    def offsets(self, plane: Sequence[int], device: torch.device) -> Tensor:
        """Return the offset of each place, int64 ``(places,)``."""
        places = torch.arange(math.prod(self.kernel), device=device)
        found = torch.zeros_like(places)
        for size, step, stride, below in zip(
            self.kernel, self.dilation, _strides(plane), _strides(self.kernel), strict=True
        ):
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
        ctx.order, ctx.out_order = torch_order(x), torch_order(indices)
        plane = x.shape[-dims:]
        offsets = windows.offsets(plane, x.device)
        place_at = offsets.new_zeros(windows.reach(plane), dtype=torch.uint8)
        place_at[offsets] = torch.arange(offsets.numel(), dtype=torch.uint8, device=x.device)
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
        found = blank(ctx.of, ctx.order, grad)
        row = ctx.shape[1:].numel()
        for first, last in pieces(ctx.shape[0], row):
            places = unpacked(codes, windows.bits, first * row, last * row)
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


def torch_order(x: Tensor) -> list[int] | None:
    """Return the order of the dimensions in memory if it is torch's channels last, else None."""
    return None if channels_last(x) is None else [0, *range(2, x.dim()), 1]


def blank(shape: Sequence[int], order: list[int] | None, like: Tensor) -> Tensor:
    """Return an empty tensor of a shape and memory order, with device and type of ``like``."""
    return _laid_out(like.new_empty(math.prod(shape)), shape, order)


def _laid_out(flat: Tensor, shape: Sequence[int], order: list[int] | None) -> Tensor:
    return as_it_lay(flat.view([shape[dim] for dim in order or range(len(shape))]), order)


def widened(x: Tensor, dims: int) -> Tensor:
    """Return the input in the type that torch pools in: autocast on the CPU widens 3d inputs of half types."""
    is_half = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if dims == 3 and is_half and x.is_cpu and torch.is_autocast_enabled("cpu") else x


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
    if dims > 1:
        return MaxPooled.apply(widened(input, dims), windows)
    flat = Windows((1, *windows.kernel), (1, *windows.stride), (0, *windows.padding), (1, *windows.dilation), ceil_mode)
    return MaxPooled.apply(input.unsqueeze(-2), flat).squeeze(-2)  # which is what torch does
