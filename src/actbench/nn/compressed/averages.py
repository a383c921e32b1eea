"""Average pooling that keeps nothing: its gradient depends on the input's shape alone, while torch keeps the input.

Output and gradient are torch's, bit for bit, since they are its operators'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.nn.compressed.pool import Numbers, blank, numbers, torch_order, widened
from actbench.nn.compressed.savedinput import needs_codes
from actbench.nn.refusals import first_order

aten = torch.ops.aten


class Averaged(torch.autograd.Function):
    """Average pooling over the last two or three dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, arguments: tuple[Any, ...]) -> Tensor:
        """Return the averages."""
        ctx.shape, ctx.dims, ctx.arguments = x.shape, dims, arguments
        ctx.order = torch_order(x) if dims == 2 else None  # as torch lays out its gradient
        averages: Tensor = (aten.avg_pool2d if dims == 2 else aten.avg_pool3d).default(x, *arguments)
        return averages

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient; as the input, whose values are not read, torch is given the memory of the result."""
        found = blank(ctx.shape, ctx.order, grad)
        write = aten.avg_pool2d_backward if ctx.dims == 2 else aten.avg_pool3d_backward
        write.grad_input(grad, found, *ctx.arguments, grad_input=found)
        return found, None, None


class AveragedTo(torch.autograd.Function):
    """Average pooling over the last two or three dimensions to an output of a given size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Sequence[int]) -> Tensor:
        """Return the averages."""
        ctx.shape, ctx.dims, ctx.order = x.shape, len(size), torch_order(x)
        pool = aten._adaptive_avg_pool2d if len(size) == 2 else aten._adaptive_avg_pool3d
        averages: Tensor = pool.default(x, size)
        return averages

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient; the input's values are not read, and only its layout may need memory for a moment."""
        in_torch_order = ctx.dims == 2 and ctx.order is not None
        like = blank(ctx.shape, ctx.order, grad) if in_torch_order else grad.new_zeros(()).expand(ctx.shape)
        spread = aten._adaptive_avg_pool2d_backward if ctx.dims == 2 else aten._adaptive_avg_pool3d_backward
        return spread.default(grad, like), None


def avg_pool1d(
    input: Tensor,  # noqa: A002  (torch's names for arguments, here and below)
    kernel_size: Numbers,
    stride: Numbers = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """Return ``F.avg_pool1d``, of (N, C, L) or (C, L)."""
    given = (kernel_size, stride, padding, ceil_mode, count_include_pad)
    return _avg_pool(F.avg_pool1d, 1, input, given)


def avg_pool2d(
    input: Tensor,  # noqa: A002
    kernel_size: Numbers,
    stride: Numbers = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Return ``F.avg_pool2d``, of (N, C, H, W) or (C, H, W)."""
    given = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _avg_pool(F.avg_pool2d, 2, input, given)


def avg_pool3d(
    input: Tensor,  # noqa: A002
    kernel_size: Numbers,
    stride: Numbers = None,
    padding: Numbers = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Return ``F.avg_pool3d``, of (N, C, D, H, W) or (C, D, H, W)."""
    given = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _avg_pool(F.avg_pool3d, 3, input, given)


def _avg_pool(exact: Callable[..., Tensor], dims: int, x: Tensor, given: tuple[Any, ...]) -> Tensor:
    if not needs_codes(x) or x.dim() - dims not in (1, 2):
        return exact(x, *given)
    kernel = numbers(given[0], dims)
    stride, padding = numbers(given[1], dims) or kernel, numbers(given[2], dims)
    if dims > 1:
        averages: Tensor = Averaged.apply(widened(x, dims), dims, (kernel, stride, padding, *given[3:]))
        return averages
    arguments = ((1, *kernel), (1, *stride), (0, *padding), *given[3:], None)
    rows: Tensor = Averaged.apply(x.unsqueeze(-2), 2, arguments)
    return rows.squeeze(-2)  # which is what torch does


def adaptive_avg_pool1d(input: Tensor, output_size: Any) -> Tensor:  # noqa: A002
    """Return ``F.adaptive_avg_pool1d``, of (N, C, L) or (C, L)."""
    return _adaptive(F.adaptive_avg_pool1d, 1, input, output_size)


def adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor:  # noqa: A002
    """Return ``F.adaptive_avg_pool2d``, of (N, C, H, W) or (C, H, W)."""
    return _adaptive(F.adaptive_avg_pool2d, 2, input, output_size)


def adaptive_avg_pool3d(input: Tensor, output_size: Any) -> Tensor:  # noqa: A002
    """Return ``F.adaptive_avg_pool3d``, of (N, C, D, H, W) or (C, D, H, W)."""
    return _adaptive(F.adaptive_avg_pool3d, 3, input, output_size)


def _adaptive(exact: Callable[..., Tensor], dims: int, x: Tensor, output_size: Any) -> Tensor:
    asked = numbers(output_size, dims) or (None,) * dims
    if not needs_codes(x) or x.dim() - dims not in (1, 2) or len(asked) != dims:
        return exact(x, output_size)
    sizes = zip(asked, x.shape[-dims:], strict=True)
    size = tuple(there if wanted is None else wanted for wanted, there in sizes)
    if all(each == 1 for each in size):
        return exact(x, output_size)  # a mean, of which torch keeps nothing
    if dims > 1:
        averages: Tensor = AveragedTo.apply(widened(x, dims), size)
        return averages
    rows: Tensor = AveragedTo.apply(x.unsqueeze(-2), (1, *size))
    return rows.squeeze(-2)  # which is what torch does
