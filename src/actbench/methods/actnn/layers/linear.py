"""Linear layers, and transformers' ``Conv1D``, that pack their input."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actbench.methods.actnn.layers.savedinput import (
    Compressed,
    SavedInput,
    Sums,
    is_differentiated,
    load,
    rows_of_piece,
    save,
    summed,
)
from actbench.packing.precision import cast, cast_all, no_autocast, other_dtypes, product_dtype
from actbench.packing.refusals import first_order


class Product(torch.autograd.Function):
    """x W^T + b; the gradient of W is computed from the packed x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear) -> Tensor:
        """Return the product in autocast's type, where it is on."""
        shape, dtype, (for_x, for_weight, _, _) = x.shape, product_dtype(x), ctx.needs_input_grad
        ctx.transposed, ctx.shape = layer.transposed, shape
        ctx.dtypes = other_dtypes(dtype, x, weight, bias)
        packed = layer.packer.pack(x, layer.site) if for_weight else None
        save(ctx, packed, layer, weight if for_x else None, by_row=len(shape) > 1)
        return product(x, weight, bias, dtype, layer.transposed)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b, where they are wanted."""
        ctx.site.see_gradient(grad)
        saved, (weight,) = load(ctx, grad)
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        found: list[Tensor | None] = [None, None, None]
        with no_autocast(grad):
            if for_weight:
                found[1] = _weight_gradient(saved, grad, ctx.transposed)
            rows = rows_of(grad)
            if for_x:
                found[0] = input_gradient(ctx, rows, weight)
            if for_bias:
                found[2] = rows.sum(0)
        return *cast_all(found, ctx.dtypes), None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Return x W^T + b in ``dtype``: (..., d_out) of (..., d_in); ``transposed`` for a weight of (d_in, d_out)."""
    with no_autocast(x):
        if not x.dtype == weight.dtype == dtype:
            x, weight, bias = x.to(dtype), weight.to(dtype), cast(bias, dtype)
        if not transposed:
            return F.linear(x, weight, bias)
        out = rows_of(x) @ weight if bias is None else torch.addmm(bias, rows_of(x), weight)
        return out.view(*x.shape[:-1], -1)


def input_gradient(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of x, of ``ctx.shape``, from the rows (N, d_out) of the output's gradient."""
    weight = weight.t() if ctx.transposed else weight
    found = torch.mm(rows, weight if weight.dtype == rows.dtype else weight.to(rows.dtype))
    return found if found.shape == ctx.shape else found.view(ctx.shape)


def _weight_gradient(saved: SavedInput, grad: Tensor, transposed: bool) -> Tensor | None:
    def of(piece: slice) -> Sums:
        x, part = rows_of(saved.rows(piece)), rows_of(rows_of_piece(grad, piece))
        x = x if x.dtype == part.dtype else x.to(part.dtype)
        return (torch.mm(x.t(), part) if transposed else torch.mm(part.t(), x),)

    return summed(saved.pieces(), of)[0]


def rows_of(x: Tensor) -> Tensor:
    """Return a tensor of features as its rows, (N, d)."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


class Linear(Compressed):
    """The forward of a linear layer that packs its input."""

    weight: Tensor
    bias: Any
    transposed: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return (..., d_out) of (..., d_in) as the exact layer does, bit for bit."""
        if torch.compiler.is_compiling() and self.form is not None:
            return self.in_graph(input)
        weight, bias = self.weight, self.bias  # once: a module looks long for its parameters
        if input.numel() == 0 or not is_differentiated(input, weight, bias):
            exact: Tensor = super().forward(input)
            return exact
        output: Tensor = Product.apply(input, weight, bias, self)
        return output


class CompressedLinear(Linear, nn.Linear):
    """``nn.Linear``."""
