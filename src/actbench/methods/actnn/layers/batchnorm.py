"""Batch norm that packs its input, in one or several processes.

With xhat = (x - mean) * invstd over M values of a channel, and y = weight * xhat + bias, in training

    dx = weight * invstd * (dy - sum(dy) / M - xhat * sum(dy * xhat) / M)

(Ioffe and Szegedy 2015, arXiv 1502.03167, section 3). The two sums run over the whole batch, so the input is decoded
twice, once for the sums, once for dx: in registers, by an operator of ours that does both; for what that one does not
take, in pieces of the batch, or once and whole for torch's operator. In evaluation, with running statistics, the terms
of the sums vanish.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules._functions import SyncBatchNorm as Exact

from actbench.methods.actnn.groups import Groups
from actbench.methods.actnn.layers.savedinput import (
    Compressed,
    RowByRow,
    SavedInput,
    is_differentiated,
    load,
    rows_of_piece,
    save,
    summed,
)
from actbench.methods.actnn.ops import batchnorm
from actbench.ops.library import holds_its_values, is_watched
from actbench.packing.precision import cast_all, dtypes_of, other_dtypes, wide
from actbench.packing.refusals import first_order


@dataclass(frozen=True)
class Statistics:
    """The mean, 1 / deviation and weight (None for ones) of each channel that a batch was normalised with."""

    mean: Tensor
    invstd: Tensor
    weight: Tensor | None

    def deviation(self, x: Tensor) -> Tensor:
        """Return ``x - mean``, in float32 for halves."""
        return x.to(wide(x.dtype)) - _over_channels(self.mean, x)

    def slope(self, x: Tensor) -> Tensor:
        """Return ``weight * invstd``, to be multiplied with x."""
        return _over_channels(
            self.invstd if self.weight is None else self.invstd * self.weight.to(self.invstd.dtype), x
        )


def sums(saved: SavedInput, grad: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Return the sums over each channel of dy and of dy (x - mean), in float32 for half types."""

    def of(piece: slice) -> tuple[Tensor, Tensor]:
        part = rows_of_piece(grad, piece).to(wide(grad.dtype))
        return sum_of(part), sum_of(statistics.deviation(saved.rows(piece)).mul_(part))

    found: Any = summed(saved.pieces(), of)
    return found[0], found[1]


def sum_of(grad: Tensor) -> Tensor:
    """Return the sum over each channel of dy, in float32 for halves."""
    return grad.sum([dim for dim in range(grad.dim()) if dim != 1], dtype=wide(grad.dtype))


def input_gradient(
    saved: SavedInput, grad: Tensor, statistics: Statistics, mean_dy: Tensor, mean_dy_deviation: Tensor
) -> Tensor | None:
    """Return dx in training, given both sums over M; the second is of dy (x - mean)."""
    found = RowByRow(grad.shape[0])
    inclination = mean_dy_deviation * statistics.invstd.to(mean_dy.dtype).square()

    def write(piece: slice) -> None:
        x, part = saved.rows(piece), rows_of_piece(grad, piece)
        room = found.room(piece, x)
        work = room if room.dtype == wide(room.dtype) else torch.empty_like(room, dtype=wide(room.dtype))
        torch.sub(x, _over_channels(statistics.mean, x), out=work).mul_(_over_channels(inclination, x))
        torch.sub(part, work, out=work).sub_(_over_channels(mean_dy, part)).mul_(statistics.slope(part))
        room.copy_(work)

    for piece in saved.pieces():
        write(piece)
    return found.whole


def _over_channels(values: Tensor, x: Tensor) -> Tensor:
    """Return a number for each channel, in a shape to combine with x, in float32 for half types."""
    return values.to(wide(x.dtype)).view(-1, *(1 for _ in range(x.dim() - 2)))


class BatchNormalization(torch.autograd.Function):
    """Batch norm by the operator that torch would choose, cuDNN's or its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: Any) -> Tensor:
        """Return the normalised batch; update the running statistics in training."""
        (mean_now, variance_now), (training, momentum) = layer.running(), layer.mode()
        ctx.training, ctx.eps = training, layer.eps
        ctx.dtypes = other_dtypes(torch.float32, x, weight, bias)  # in which sums of half types are
        for_x, for_weight, _ = ctx.needs_input_grad[:3]
        # in evaluation dx = dy * slope, which needs no x
        packed = layer.packer.pack(x, layer.site) if for_weight or (for_x and training) else None
        # the operator behind F.batch_norm, which also says which backend ran and what that one keeps
        output, mean, invstd, reserve, ctx.backend = torch._batch_norm_impl_index(
            x, weight, bias, mean_now, variance_now, training, momentum, layer.eps, torch.backends.cudnn.enabled
        )
        # in training backward reads the batch's statistics alone, and the next forward changes the running ones in
        # place
        used = (None, None) if training else (mean_now, variance_now)
        save(ctx, packed, layer, weight, *used, mean, invstd, reserve)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are wanted."""
        ctx.site.see_gradient(grad)
        saved, others = load(ctx, grad)
        packed = _codes_in_registers(ctx, grad, saved)
        found: Any
        if packed is not None:
            found = _from_codes(ctx, grad, saved, others, packed)
        elif saved.packed is not None and len(saved.pieces()) == 1:
            found = _at_once(ctx, grad, saved, others)
        else:
            found = _in_pieces(ctx, grad, saved, others)
        wanted = zip(found, ctx.needs_input_grad, strict=False)
        return *cast_all([each if is_wanted else None for each, is_wanted in wanted], ctx.dtypes), None


SHORTEST_ROW = 128
"""The fewest elements of a channel in a sample for which it is faster to decode in registers: each such row is a warp's
work on a GPU, and costs a CPU as much as some hundred elements."""


def _codes_in_registers(ctx: Any, grad: Tensor, saved: SavedInput) -> tuple[Tensor, int] | None:
    """Return codes and their bits, if our own operator takes them: of contiguous tensors, in training."""
    if saved.packed is None or not ctx.training or not ctx.needs_input_grad[0]:
        return None
    codec, layout, parts = saved.packed
    # its groups alone run through the tensor, without regard to rows
    if type(codec) is not Groups or layout.order is not None or layout.dtype != grad.dtype:
        return None
    columns = layout.shape[2:].numel()
    if columns < SHORTEST_ROW or not batchnorm.takes_rows(columns):
        return None
    return codec.whole(parts, layout) if grad.is_contiguous() and not grad._is_zerotensor() else None


def _from_codes(
    ctx: Any, grad: Tensor, saved: SavedInput, others: Any, packed: tuple[Tensor, int]
) -> tuple[Tensor, ...]:
    whole: Any = saved.packed
    (codes, bits), words, size = packed, whole.parts[1], whole.codec.group_size
    weight, _, _, mean, invstd, _ = others
    weight = torch.ones_like(mean) if weight is None else weight.contiguous()  # a view if a call replaced the parameter
    if ctx.dtypes is not None:
        # of a layer of a half type, statistics are halves on the CPU, and so is the weight everywhere
        mean, invstd, weight = (each.to(wide(each.dtype)) for each in (mean, invstd, weight))
    is_plain = type(codes) is type(words) is Tensor and holds_its_values(grad) and holds_its_values(weight)
    if is_plain and grad.dtype is not torch.float64 and not is_watched():
        run = batchnorm.gradients(grad.shape, grad.dtype, bits, size, grad.device)
        return run(grad, codes, words, mean, invstd, weight)
    return batchnorm.backward(grad, codes, words, bits, size, mean, invstd, weight)[:3]


_backward: Any = torch.ops.aten._batch_norm_impl_index_backward.default


def _at_once(ctx: Any, grad: Tensor, saved: SavedInput, others: Any) -> Any:
    weight, running_mean, running_var, mean, invstd, reserve = others
    x = saved.rows(saved.pieces()[0])
    wanted = list(ctx.needs_input_grad[:3])
    return _backward(
        ctx.backend, x, grad, weight, running_mean, running_var, mean, invstd, ctx.training, ctx.eps, wanted, reserve
    )


def _in_pieces(ctx: Any, grad: Tensor, saved: SavedInput, others: Any) -> tuple[Tensor | None, ...]:
    weight, running_mean, running_var, mean, invstd, _ = others
    if not ctx.training:
        # the operator returned no statistics: in evaluation the running ones are used
        wide_var = running_var.to(wide(running_var.dtype))
        mean, invstd = running_mean, (wide_var + ctx.eps).rsqrt()
    statistics = Statistics(mean, invstd, weight)
    if saved.packed is None:
        return grad * statistics.slope(grad) if ctx.needs_input_grad[0] else None, None, sum_of(grad)
    sum_dy, sum_dy_deviation = sums(saved, grad, statistics)
    for_x = None
    if ctx.needs_input_grad[0] and ctx.training:
        count = grad.numel() // grad.shape[1]
        for_x = input_gradient(saved, grad, statistics, sum_dy / count, sum_dy_deviation / count)
    elif ctx.needs_input_grad[0]:
        for_x = grad * statistics.slope(grad)
    return for_x, sum_dy_deviation * invstd, sum_dy


class BatchNorm(Compressed):
    """The forward of a batch norm layer that packs its input."""

    only_updates_statistics = True  # in training it never reads them: a recomputed block may leave them as they are

    weight: Any
    bias: Any

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit, with the same update of running statistics."""
        if torch.compiler.is_compiling() and self.form is not None:
            return self.in_graph(input)
        weight, bias = self.weight, self.bias  # once: a module looks long for its parameters
        if not self.is_worth(input, weight, bias):
            exact: Tensor = super().forward(input)
            return exact
        layer: Any = self
        layer._check_input_dim(input)
        output: Tensor = BatchNormalization.apply(input, weight, bias, self)
        return output

    def is_worth(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Return whether a gradient is needed, and each channel has more than one number."""
        return x.dim() > 1 and x.numel() > x.shape[1] and is_differentiated(x, weight, bias)

    def running(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the running statistics to use or update."""
        layer: Any = self
        is_used = not layer.training or layer.track_running_stats
        return (layer.running_mean, layer.running_var) if is_used else (None, None)

    def mode(self) -> tuple[bool, float]:
        """Count the batch; return whether its statistics are used, and its share in the running statistics."""
        layer: Any = self
        training, momentum = layer.training, 0.0 if layer.momentum is None else layer.momentum
        # as _BatchNorm.forward of torch/nn/modules/batchnorm.py, step for step
        tracked = layer.num_batches_tracked if training and layer.track_running_stats else None
        if tracked is not None:
            tracked.add_(1)
            if layer.momentum is None:
                momentum = 1.0 / float(tracked)
        return training or (layer.running_mean is None and layer.running_var is None), momentum


class CompressedBatchNorm1d(BatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d``."""


class CompressedBatchNorm2d(BatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d``."""


class CompressedBatchNorm3d(BatchNorm, nn.BatchNorm3d):
    """``nn.BatchNorm3d``."""


class SyncBatchNormalization(torch.autograd.Function):
    """Torch's own function, with a backward pass in pieces of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: Any, group: Any) -> Tensor:
        """Return the normalised batch; update the running statistics."""
        (mean_now, variance_now), (_, momentum) = layer.running(), layer.mode()
        ctx.group, ctx.dtypes = group, dtypes_of(x, weight, bias)
        packed = layer.packer.pack(x, layer.site) if any(ctx.needs_input_grad[:2]) else None
        exact = _Context()
        size = distributed.get_world_size(group)
        output: Tensor = Exact.forward(  # type: ignore[no-untyped-call]
            exact, x, weight, bias, mean_now, variance_now, layer.eps, momentum, group, size
        )
        # SyncBatchNorm.forward of torch/nn/modules/_functions.py saves x, weight, mean, invstd and counts
        _, _, mean, invstd, counts = exact.load
        save(ctx, packed, layer, weight, mean, invstd, counts)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias that are needed; the last two for this process only."""
        ctx.site.see_gradient(grad)
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        saved, (weight, mean, invstd, counts) = load(ctx, grad)
        found: list[Tensor | None] = [None, None, None]
        if saved.packed is None:
            found[2] = sum_of(grad)
        else:
            statistics = Statistics(mean, invstd, weight)
            sum_dy, sum_dy_deviation = sums(saved, grad, statistics)
            found[1:] = sum_dy_deviation * invstd if for_weight else None, sum_dy if for_bias else None
            if for_x:
                both = torch.stack([sum_dy, sum_dy_deviation])
                # both sums at once, as torch's SyncBatchNorm does
                distributed.all_reduce(both, group=ctx.group)
                found[0] = input_gradient(saved, grad, statistics, *(both / counts.sum()))
        return *cast_all(found, ctx.dtypes), None, None


class _Context(SimpleNamespace):
    load: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.load = tensors


class CompressedSyncBatchNorm(BatchNorm, nn.SyncBatchNorm):
    """``nn.SyncBatchNorm``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit; without a process group, what batch norm returns."""
        if torch.compiler.is_compiling() and self.form is not None:
            return self.in_graph(input)
        if not (self.training and distributed.is_available() and distributed.is_initialized()):
            return super().forward(input)
        group = self.process_group or distributed.group.WORLD
        # as need_sync of torch's SyncBatchNorm.forward
        if distributed.get_world_size(group) < 2 and input.device.type != "cpu":
            return super().forward(input)
        if input.device.type == "cpu" or not self.is_worth(input, self.weight, self.bias):
            return nn.SyncBatchNorm.forward(self, input)  # which refuses a CPU
        self._check_input_dim(input)
        output: Tensor = SyncBatchNormalization.apply(input, self.weight, self.bias, self, group)
        return output
