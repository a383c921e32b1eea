"""Average pooling that packs nothing: its gradient depends on the input's shape alone, while torch saves the input.

Output and gradient are torch's, bit for bit: torch's operators compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.nn.compressed.geometry import Numbers, numbers
from actbench.nn.compressed.pool import blank, torch_order, widened
from actbench.nn.compressed.savedinput import needs_codes
from actbench.nn.refusals import first_order

aten = torch.ops.aten


class Averaged(torch.autograd.Function):
    """Average pooling over the last two or three dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, arguments: tuple[Any, ...]) -> Tensor:
        """Return the averages."""
        ctx.shape, ctx.dims, ctx.arguments = x.shape, dims, arguments
        ctx.order = torch_order(x) if dims == 2 else None  # the layout of torch's gradient
        averages: Tensor = (aten.avg_pool2d if dims == 2 else aten.avg_pool3d).default(x, *arguments)
        return averages

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient; torch does not read the input's values, so it gets the result's memory as input."""
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
        """Return the gradient; torch reads only the layout of the input."""
        in_torch_order = ctx.dims == 2 and ctx.order is not None
        like = blank(ctx.shape, ctx.order, grad) if in_torch_order else grad.new_zeros(()).expand(ctx.shape)
        spread = aten._adaptive_avg_pool2d_backward if ctx.dims == 2 else aten._adaptive_avg_pool3d_backward
        return spread.default(grad, like), None


def avg_pool(
    dims: int,
    input: Tensor,  # noqa: A002  (torch's names for arguments)
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
    options = (ceil_mode, count_include_pad, divisor_override)
    if dims > 1:
        averages: Tensor = Averaged.apply(widened(input, dims), dims, (kernel, steps, pads, *options))
        return averages
    arguments = ((1, *kernel), (1, *steps), (0, *pads), *options)
    rows: Tensor = Averaged.apply(input.unsqueeze(-2), 2, arguments)
    return rows.squeeze(-2)  # which is what torch does


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
    if dims > 1:
        averages: Tensor = AveragedTo.apply(widened(input, dims), size)
        return averages
    rows: Tensor = AveragedTo.apply(input.unsqueeze(-2), (1, *size))
    return rows.squeeze(-2)  # which is what torch does
