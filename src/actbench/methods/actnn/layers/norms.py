"""Layer norm and group norm that pack their input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from actbench.methods.actnn.layers.savedinput import (
    Compressed,
    RowByRow,
    SavedInput,
    Sums,
    is_differentiated,
    load,
    rows_of_piece,
    save,
    summed,
)
from actbench.packing.precision import cast, dtypes_of, no_autocast, norm_dtype
from actbench.packing.refusals import first_order


class LayerNormalization(torch.autograd.Function):
    """Layer norm from the packed input and the exact statistics of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: CompressedLayerNorm) -> Tensor:
        """Return the normalised rows, in float32 under autocast on CUDA."""
        ctx.normalized, ctx.cast = tuple(layer.normalized_shape), norm_dtype(x)
        ctx.dtypes = dtypes_of(x, weight, bias)
        packed = layer.packer.pack(x, layer.site) if any(ctx.needs_input_grad[:2]) else None
        with no_autocast(x):
            wide, *parameters = (cast(each, ctx.cast) for each in (x, weight, bias))
            output, mean, rstd = _layer_norm(wide, ctx.normalized, *parameters, layer.eps)
        save(ctx, packed, layer, weight, bias, mean, rstd, by_row=x.dim() > len(ctx.normalized))
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are wanted."""
        saved, (weight, bias, mean, rstd) = load(ctx, grad)
        weight, bias = cast(weight, ctx.cast), cast(bias, ctx.cast)

        def of(piece: slice) -> Sums:
            x = saved.rows(piece).to(grad.dtype)
            statistics = rows_of_piece(mean, piece), rows_of_piece(rstd, piece)
            return _layer_norm_backward(
                rows_of_piece(grad, piece), x, ctx.normalized, *statistics, weight, bias, list(ctx.needs_input_grad[:3])
            )

        inner = len(ctx.normalized)
        return *_finish(ctx, saved, grad, of, list(range(grad.dim() - inner))), None


class GroupNormalization(torch.autograd.Function):
    """Group norm from the packed input and the exact statistics of each group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: CompressedGroupNorm) -> Tensor:
        """Return the normalised groups, in float32 under autocast on CUDA."""
        ctx.groups, ctx.cast = layer.num_groups, norm_dtype(x)
        ctx.dtypes = dtypes_of(x, weight, bias)
        packed = layer.packer.pack(x, layer.site) if any(ctx.needs_input_grad[:2]) else None
        with no_autocast(x):
            wide, *parameters = (cast(each, ctx.cast) for each in (_laid_out(x, x), weight, bias))
            output, mean, rstd = _group_norm(wide, *parameters, *_sizes(x), ctx.groups, layer.eps)
        save(ctx, packed, layer, weight, mean, rstd)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are wanted."""
        saved, (weight, mean, rstd) = load(ctx, grad)
        weight = cast(weight, ctx.cast)

        def of(piece: slice) -> Sums:
            x = saved.rows(piece).to(grad.dtype)
            statistics = rows_of_piece(mean, piece), rows_of_piece(rstd, piece), weight
            return _group_norm_backward(
                _laid_out(rows_of_piece(grad, piece), x),
                _laid_out(x, x),
                *statistics,
                *_sizes(x),
                ctx.groups,
                list(ctx.needs_input_grad[:3]),
            )

        others = [dim for dim in range(grad.dim()) if dim != 1]
        return *_finish(ctx, saved, grad, of, others), None


def _finish(
    ctx: Any, saved: SavedInput, grad: Tensor, of: Callable[[slice], Sums], outer: list[int]
) -> list[Tensor | None]:
    """Return the gradients of x, weight and bias from the results of ``of`` for each piece of the batch."""
    ctx.site.see_gradient(grad)
    if saved.packed is None:  # only the bias is trained
        found: Sums = (None, None, grad.sum(outer) if outer else grad)
    elif len(saved.pieces()) == 1:
        found = of(saved.pieces()[0])
    else:
        found = _in_pieces(saved, grad, of)
    wanted = zip(found, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
    return [cast(each, dtype) if is_wanted else None for each, dtype, is_wanted in wanted]


def _in_pieces(saved: SavedInput, grad: Tensor, of: Callable[[slice], Sums]) -> Sums:
    for_x = RowByRow(grad.shape[0])

    def write(piece: slice) -> Sums:
        part, for_weight, for_bias = of(piece)
        if part is not None:
            for_x.write(piece, part)
        return for_weight, for_bias

    for_weight, for_bias = summed(saved.pieces(), write)
    return for_x.whole, for_weight, for_bias


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _laid_out(tensor: Tensor, x: Tensor) -> Tensor:
    """Return a tensor in the layout that torch's group norm uses: that of x on a CPU, else contiguous."""
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
        if torch.compiler.is_compiling() and self.form is not None:
            return self.in_graph(input)
        if input.numel() == 0 or not is_differentiated(input, self.weight, self.bias):
            return super().forward(input)
        self.site.row = math.prod(self.normalized_shape)
        output: Tensor = LayerNormalization.apply(input, self.weight, self.bias, self)
        return output


class CompressedGroupNorm(Compressed, nn.GroupNorm):
    """``nn.GroupNorm``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return what the exact layer returns, bit for bit."""
        if torch.compiler.is_compiling() and self.form is not None:
            return self.in_graph(input)
        is_worth = input.dim() > 1 and input.numel() > self.num_groups  # else torch refuses it
        if not (is_worth and is_differentiated(input, self.weight, self.bias)):
            return super().forward(input)
        self.site.row = input.numel() // (input.shape[0] * self.num_groups)
        output: Tensor = GroupNormalization.apply(input, self.weight, self.bias, self)
        return output
