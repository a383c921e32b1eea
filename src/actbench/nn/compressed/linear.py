"""Linear layers, transformers' ``Conv1D`` too, that keep their input through a keeper."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actbench.nn.compressed.held import Held, Sums, keep, save, saved, summed
from actbench.nn.compressed.layer import Compressed, is_differentiated
from actbench.nn.firstorder import first_order
from actbench.nn.keeping import Keeper, Place
from actbench.nn.precision import cast, no_autocast, product_dtype


class Product(torch.autograd.Function):
    """x W^T + b, of which the gradient of W is found from what was kept of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, keeper: Keeper, place: Place
    ) -> Tensor:
        """Return the product in autocast's type, where it is on."""
        ctx.transposed, ctx.shape = transposed, x.shape
        ctx.dtypes = [None if each is None else each.dtype for each in (x, weight, bias)]
        kept = keep(x, keeper, place, needed=ctx.needs_input_grad[1])
        save(ctx, kept, place, keeper, weight if ctx.needs_input_grad[0] else None, by_row=x.dim() > 1)
        dtype = product_dtype(x)
        with no_autocast(x):
            return _product(x.to(dtype), weight.to(dtype), cast(bias, dtype), transposed)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b, where they are wanted."""
        ctx.place.see_gradient(grad)
        held, (weight,) = saved(ctx, grad)
        found: list[Tensor | None] = [None, None, None]
        with no_autocast(grad):
            if ctx.needs_input_grad[1]:
                found[1] = _weight_gradient(held, grad, ctx.transposed)
            rows = _rows(grad)
            if ctx.needs_input_grad[0]:
                weight = weight.to(grad.dtype)
                found[0] = (rows @ (weight.t() if ctx.transposed else weight)).view(ctx.shape)
            if ctx.needs_input_grad[2]:
                found[2] = rows.sum(0)
        return *(cast(each, dtype) for each, dtype in zip(found, ctx.dtypes, strict=True)), None, None, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, keeper: Keeper, place: Place, *, transposed: bool = False
) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, bit for bit, keeping x for the gradient of the weight where that is wanted.

    Args:
        x: (..., d_in); a floating-point type, any strides.
        weight: (d_out, d_in), or (d_in, d_out) if ``transposed``.
        bias: (d_out,), or None.
        keeper: Keeps x; cuts dimension 0 into ``keeper.pieces`` pieces in the backward pass.
        place: Whom x is kept for.
        transposed: Whether the weight lies as in transformers' ``Conv1D``.

    Returns:
        (..., d_out).
    """
    output: Tensor = Product.apply(x, weight, bias, transposed, keeper, place)
    return output


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return F.linear(x, weight, bias)
    product = _rows(x) @ weight if bias is None else torch.addmm(bias, _rows(x), weight)
    return product.view(*x.shape[:-1], -1)


def _weight_gradient(held: Held, grad: Tensor, transposed: bool) -> Tensor | None:
    def of(piece: slice) -> Sums:
        x = held.rows(piece).to(grad.dtype)
        part = _rows(grad[piece] if x.dim() > 1 else grad)
        return (_rows(x).t() @ part if transposed else part.t() @ _rows(x),)

    return summed(held.pieces(), of)[0]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class Linear(Compressed):
    """What a linear layer gains."""

    weight: Tensor
    bias: Any
    transposed: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit.

        Args:
            input: (..., d_in).

        Returns:
            (..., d_out).
        """
        if input.numel() == 0 or not is_differentiated(input, self.weight, self.bias):
            exact: Tensor = super().forward(input)  # type: ignore[misc]
            return exact
        return linear(input, self.weight, self.bias, self.keeper, self.place, transposed=self.transposed)


class CompressedLinear(Linear, nn.Linear):
    """``nn.Linear``."""
