"""Layer norm and group norm that keep their input through a keeper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from actbench.nn.compressed.held import Held, RowByRow, Sums, keep, save, saved, summed
from actbench.nn.compressed.layer import Compressed, is_differentiated
from actbench.nn.firstorder import first_order
from actbench.nn.keeping import Keeper, Place
from actbench.nn.precision import cast, no_autocast, norm_dtype


class LayerNormalization(torch.autograd.Function):
    """Layer norm, whose backward pass has what was kept of the input, and the exact mean and deviation of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        normalized: Sequence[int],
        eps: float,
        keeper: Keeper,
        place: Place,
    ) -> Tensor:
        """Return the normalised rows, in float32 under autocast on CUDA."""
        ctx.normalized, ctx.cast = tuple(normalized), norm_dtype(x)
        ctx.dtypes = [None if each is None else each.dtype for each in (x, weight, bias)]
        kept = keep(x, keeper, place, needed=any(ctx.needs_input_grad[:2]))
        with no_autocast(x):
            wide, *parameters = (cast(each, ctx.cast) for each in (x, weight, bias))
            output, mean, rstd = _layer_norm(wide, ctx.normalized, *parameters, eps)
        save(ctx, kept, place, keeper, weight, bias, mean, rstd, by_row=x.dim() > len(ctx.normalized))
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are wanted."""
        held, (weight, bias, mean, rstd) = saved(ctx, grad)
        weight, bias = cast(weight, ctx.cast), cast(bias, ctx.cast)

        def of(piece: slice) -> Sums:
            x = held.rows(piece).to(grad.dtype)
            statistics = mean[piece], rstd[piece]
            return _layer_norm_backward(
                grad[piece], x, ctx.normalized, *statistics, weight, bias, list(ctx.needs_input_grad[:3])
            )

        inner = len(ctx.normalized)
        return *_finish(ctx, held, grad, of, list(range(grad.dim() - inner))), *(None,) * 4


class GroupNormalization(torch.autograd.Function):
    """Group norm, whose backward pass has what was kept of the input, and the exact statistics of each group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        keeper: Keeper,
        place: Place,
    ) -> Tensor:
        """Return the normalised groups, in float32 under autocast on CUDA."""
        ctx.groups, ctx.cast = groups, norm_dtype(x)
        ctx.dtypes = [None if each is None else each.dtype for each in (x, weight, bias)]
        kept = keep(x, keeper, place, needed=any(ctx.needs_input_grad[:2]))
        with no_autocast(x):
            wide, *parameters = (cast(each, ctx.cast) for each in (_laid_out(x, x), weight, bias))
            output, mean, rstd = _group_norm(wide, *parameters, *_sizes(x), groups, eps)
        save(ctx, kept, place, keeper, weight, mean, rstd)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are wanted."""
        held, (weight, mean, rstd) = saved(ctx, grad)
        weight = cast(weight, ctx.cast)

        def of(piece: slice) -> Sums:
            x = held.rows(piece).to(grad.dtype)
            statistics = mean[piece], rstd[piece], weight
            return _group_norm_backward(
                _laid_out(grad[piece], x),
                _laid_out(x, x),
                *statistics,
                *_sizes(x),
                ctx.groups,
                list(ctx.needs_input_grad[:3]),
            )

        others = [dim for dim in range(grad.dim()) if dim != 1]
        return *_finish(ctx, held, grad, of, others), *(None,) * 4


def layer_norm(
    x: Tensor,
    normalized: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    keeper: Keeper,
    place: Place,
) -> Tensor:
    """Return what ``F.layer_norm`` returns, bit for bit, keeping x where the gradient of x or weight is wanted.

    Args:
        x: ``(*, *normalized)``; a floating-point type, any strides.
        normalized: The shape of what is normalised.
        weight: Of that shape, or None.
        bias: Of that shape, or None.
        eps: Added to the variance.
        keeper: Keeps x; cuts dimension 0 into ``keeper.pieces`` pieces in the backward pass, if it is not normalised.
        place: Whom x is kept for.
    """
    place.row = math.prod(normalized)
    output: Tensor = LayerNormalization.apply(x, weight, bias, normalized, eps, keeper, place)
    return output


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, keeper: Keeper, place: Place
) -> Tensor:
    """Return what ``F.group_norm`` returns, bit for bit, keeping x where the gradient of x or weight is wanted.

    Args:
        x: ``(N, C, *)`` with more than one value a group; a floating-point type, any strides.
        groups: Of channels.
        weight: (C,), or None.
        bias: (C,), or None.
        eps: Added to the variance.
        keeper: Keeps x; cuts the batch into ``keeper.pieces`` pieces in the backward pass.
        place: Whom x is kept for.
    """
    place.row = x.numel() // (x.shape[0] * groups)
    output: Tensor = GroupNormalization.apply(x, weight, bias, groups, eps, keeper, place)
    return output


def _finish(ctx: Any, held: Held, grad: Tensor, of: Callable[[slice], Sums], outer: list[int]) -> list[Tensor | None]:
    """Return the gradients of x, weight and bias from what ``of`` gives for each piece of the batch."""
    ctx.place.see_gradient(grad)
    if held.form is None:  # only the bias learns
        found: Sums = (None, None, grad.sum(outer) if outer else grad)
    elif len(held.pieces()) == 1:
        found = of(held.pieces()[0])
    else:
        found = _in_pieces(held, grad, of)
    wanted = zip(found, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
    return [cast(each, dtype) if is_wanted else None for each, dtype, is_wanted in wanted]


def _in_pieces(held: Held, grad: Tensor, of: Callable[[slice], Sums]) -> Sums:
    for_x = RowByRow(grad.shape[0])

    def write(piece: slice) -> Sums:
        part, for_weight, for_bias = of(piece)
        if part is not None:
            for_x.write(piece, part)
        return for_weight, for_bias

    for_weight, for_bias = summed(held.pieces(), write)
    return for_x.whole, for_weight, for_bias


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _laid_out(tensor: Tensor, x: Tensor) -> Tensor:
    """Return a tensor laid out as torch's group norm takes it: on a CPU as x, else contiguous."""
    on_cpu = x.device.type == "cpu"
    return tensor.contiguous(memory_format=suggest_memory_format(x) if on_cpu else torch.contiguous_format)


_layer_norm: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.aten.native_layer_norm.default
_group_norm: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.aten.native_group_norm.default
_layer_norm_backward: Callable[..., Sums] = torch.ops.aten.native_layer_norm_backward.default
_group_norm_backward: Callable[..., Sums] = torch.ops.aten.native_group_norm_backward.default


class CompressedLayerNorm(Compressed, nn.LayerNorm):
    """``nn.LayerNorm``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit."""
        if input.numel() == 0 or not is_differentiated(input, self.weight, self.bias):
            return super().forward(input)
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.keeper, self.place)


class CompressedGroupNorm(Compressed, nn.GroupNorm):
    """``nn.GroupNorm``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return what the exact layer returns, bit for bit."""
        is_worth = input.dim() > 1 and input.numel() > self.num_groups  # else torch refuses it
        if not (is_worth and is_differentiated(input, self.weight, self.bias)):
            return super().forward(input)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, self.keeper, self.place)
