"""Batch norm that keeps its input through a keeper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from actbench.nn.compressed.channels import Statistics, input_gradient, sum_of, sums
from actbench.nn.compressed.held import Held, keep, save, saved
from actbench.nn.compressed.layer import Compressed, is_differentiated
from actbench.nn.firstorder import first_order
from actbench.nn.keeping import Keeper, Place
from actbench.nn.precision import cast


class BatchNormalization(torch.autograd.Function):
    """Batch norm by the operator that torch would choose, cuDNN's or its own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        training: bool,
        momentum: float,
        eps: float,
        keeper: Keeper,
        place: Place,
    ) -> Tensor:
        """Return the normalised batch; update the running statistics in training."""
        ctx.training, ctx.eps = training, eps
        ctx.dtypes = [None if each is None else each.dtype for each in (x, weight, bias)]
        for_x, for_weight, _ = ctx.needs_input_grad[:3]
        kept = keep(x, keeper, place, needed=for_weight or (for_x and training))
        output, mean, invstd, reserve, ctx.backend = torch._batch_norm_impl_index(
            x, weight, bias, *running, training, momentum, eps, torch.backends.cudnn.enabled
        )
        used = (None, None) if training else running
        save(ctx, kept, place, keeper, weight, *used, mean, invstd, reserve)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are wanted."""
        ctx.place.see_gradient(grad)
        held, others = saved(ctx, grad)
        if held.form is not None and len(held.pieces()) == 1:
            found = _at_once(ctx, grad, held, others)
        else:
            found = _in_pieces(ctx, grad, held, others)
        wanted = zip(found, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
        return *(cast(each, dtype) if is_wanted else None for each, dtype, is_wanted in wanted), *(None,) * 6


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    keeper: Keeper,
    place: Place,
) -> Tensor:
    """Return what ``F.batch_norm`` returns, bit for bit, keeping x where a wanted gradient needs it.

    In training those of x and weight need it, in evaluation that of weight.

    Args:
        x: ``(N, C, *)`` with more than one value a channel; a floating-point type, any strides.
        running_mean: (C,), updated in training, used in evaluation; or None.
        running_var: As ``running_mean``.
        weight: (C,), or None.
        bias: (C,), or None.
        training: Whether the statistics are those of the batch.
        momentum: Share of the batch in the new running statistics.
        eps: Added to the variance.
        keeper: Keeps x; cuts the batch into ``keeper.pieces`` pieces in the backward pass.
        place: Whom x is kept for.
    """
    running = (running_mean, running_var)
    output: Tensor = BatchNormalization.apply(x, weight, bias, running, training, momentum, eps, keeper, place)
    return output


def _at_once(ctx: Any, grad: Tensor, held: Held, others: Any) -> Any:
    weight, running_mean, running_var, mean, invstd, reserve = others
    x = held.rows(held.pieces()[0])
    wanted = list(ctx.needs_input_grad[:3])
    return torch.ops.aten._batch_norm_impl_index_backward(
        ctx.backend, x, grad, weight, running_mean, running_var, mean, invstd, ctx.training, ctx.eps, wanted, reserve
    )


def _in_pieces(ctx: Any, grad: Tensor, held: Held, others: Any) -> tuple[Tensor | None, ...]:
    weight, running_mean, running_var, mean, invstd, _ = others
    if not ctx.training:
        wide_var = running_var.to(torch.promote_types(running_var.dtype, torch.float32))
        mean, invstd = running_mean, (wide_var + ctx.eps).rsqrt()
    statistics = Statistics(mean, invstd, weight)
    if held.form is None:
        return grad * statistics.slope(grad) if ctx.needs_input_grad[0] else None, None, sum_of(grad)
    sum_dy, sum_dy_deviation = sums(held, grad, statistics)
    for_x = None
    if ctx.needs_input_grad[0] and ctx.training:
        count = grad.numel() // grad.shape[1]
        for_x = input_gradient(held, grad, statistics, sum_dy / count, sum_dy_deviation / count)
    elif ctx.needs_input_grad[0]:
        for_x = grad * statistics.slope(grad)
    return for_x, sum_dy_deviation * invstd, sum_dy


class BatchNorm(Compressed):
    """What a batch norm layer gains."""

    weight: Any
    bias: Any

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit, and update its running statistics so."""
        if not self.is_worth(input):
            exact: Tensor = super().forward(input)  # type: ignore[misc]
            return exact
        layer: Any = self
        layer._check_input_dim(input)
        return batch_norm(
            input, *self.running(), self.weight, self.bias, *self.mode(), layer.eps, self.keeper, self.place
        )

    def is_worth(self, x: Tensor) -> bool:
        """Return whether a gradient is wanted, and there is more than a number of each channel to keep for it."""
        return x.dim() > 1 and x.numel() > x.shape[1] and is_differentiated(x, self.weight, self.bias)

    def running(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the running statistics that are to be used or updated."""
        layer: Any = self
        is_used = not layer.training or layer.track_running_stats
        return (layer.running_mean, layer.running_var) if is_used else (None, None)

    def mode(self) -> tuple[bool, float]:
        """Count the batch, and return whether its statistics are used, and its share in the running ones."""
        layer: Any = self
        momentum = 0.0 if layer.momentum is None else layer.momentum
        if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if layer.momentum is None:
                momentum = 1.0 / float(layer.num_batches_tracked)
        return layer.training or (layer.running_mean is None and layer.running_var is None), momentum


class CompressedBatchNorm1d(BatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d``."""


class CompressedBatchNorm2d(BatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d``."""


class CompressedBatchNorm3d(BatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d``."""
