"""Batch norm over all processes of a group that keeps its input through a keeper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules._functions import SyncBatchNorm as Exact

from actbench.nn.compressed.batchnorm import BatchNorm
from actbench.nn.compressed.channels import Statistics, input_gradient, sum_of, sums
from actbench.nn.compressed.held import keep, save, saved
from actbench.nn.firstorder import first_order
from actbench.nn.keeping import Keeper, Place
from actbench.nn.precision import cast


class SyncBatchNormalization(torch.autograd.Function):
    """Torch's own function with another memory: its forward runs as it is, its backward in pieces of the batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
        group: Any,
        keeper: Keeper,
        place: Place,
    ) -> Tensor:
        """Return the normalised batch; update the running statistics."""
        ctx.group = group
        ctx.dtypes = [None if each is None else each.dtype for each in (x, weight, bias)]
        kept = keep(x, keeper, place, needed=any(ctx.needs_input_grad[:2]))
        exact = _Context()
        size = distributed.get_world_size(group)
        output: Tensor = Exact.forward(  # type: ignore[no-untyped-call]
            exact, x, weight, bias, *running, eps, momentum, group, size
        )
        _, _, mean, invstd, counts = exact.saved
        save(ctx, kept, place, keeper, weight, mean, invstd, counts)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are wanted; those of the last two of this process."""
        ctx.place.see_gradient(grad)
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        held, (weight, mean, invstd, counts) = saved(ctx, grad)
        found: list[Tensor | None] = [None, None, None]
        if held.form is None:
            found[2] = sum_of(grad)
        else:
            statistics = Statistics(mean, invstd, weight)
            sum_dy, sum_dy_deviation = sums(held, grad, statistics)
            found[1:] = sum_dy_deviation * invstd if for_weight else None, sum_dy if for_bias else None
            if for_x:
                both = torch.stack([sum_dy, sum_dy_deviation])
                distributed.all_reduce(both, group=ctx.group)
                found[0] = input_gradient(held, grad, statistics, *(both / counts.sum()))
        return *(cast(each, dtype) for each, dtype in zip(found, ctx.dtypes, strict=True)), *(None,) * 6


class _Context(SimpleNamespace):
    """Stands in for autograd's context where torch's function saves what it would keep."""

    saved: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved = tensors


class CompressedSyncBatchNorm(BatchNorm, nn.SyncBatchNorm):
    """``nn.SyncBatchNorm``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit; without a group of processes, as batch norm does."""
        if not (self.training and distributed.is_available() and distributed.is_initialized()):
            return super().forward(input)
        group = self.process_group or distributed.group.WORLD
        if distributed.get_world_size(group) < 2 and input.device.type != "cpu":
            return super().forward(input)
        if input.device.type == "cpu" or not self.is_worth(input):
            return nn.SyncBatchNorm.forward(self, input)  # on a CPU it refuses
        self._check_input_dim(input)
        _, momentum = self.mode()
        output: Tensor = SyncBatchNormalization.apply(
            input, self.weight, self.bias, self.running(), momentum, self.eps, group, self.keeper, self.place
        )
        return output
