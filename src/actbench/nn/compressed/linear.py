"""Linear layers, transformers' ``Conv1D`` too, that pack their input."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actbench.nn.compressed.savedinput import (
    Compressed,
    SavedInput,
    Sums,
    is_differentiated,
    load,
    pack_input,
    save,
    summed,
)
from actbench.nn.precision import cast, no_autocast, product_dtype
from actbench.nn.refusals import first_order
from actbench.nn.saved import SavedTensors, SiteState


class Product(torch.autograd.Function):
    """x W^T + b, of which the gradient of W is found from what was packed of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        packer: SavedTensors,
        site: SiteState,
    ) -> Tensor:
        """Return the product in autocast's type, where it is on."""
        ctx.transposed, ctx.shape = transposed, x.shape
        ctx.dtypes = [None if each is None else each.dtype for each in (x, weight, bias)]
        packed = pack_input(x, packer, site, needed=ctx.needs_input_grad[1])
        save(ctx, packed, site, packer, weight if ctx.needs_input_grad[0] else None, by_row=x.dim() > 1)
        dtype = product_dtype(x)
        with no_autocast(x):
            return _product(x.to(dtype), weight.to(dtype), cast(bias, dtype), transposed)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b, where they are wanted."""
        ctx.site.see_gradient(grad)
        saved, (weight,) = load(ctx, grad)
        found: list[Tensor | None] = [None, None, None]
        with no_autocast(grad):
            if ctx.needs_input_grad[1]:
                found[1] = _weight_gradient(saved, grad, ctx.transposed)
            rows = _rows(grad)
            if ctx.needs_input_grad[0]:
                weight = weight.to(grad.dtype)
                found[0] = (rows @ (weight.t() if ctx.transposed else weight)).view(ctx.shape)
            if ctx.needs_input_grad[2]:
                found[2] = rows.sum(0)
        return *(cast(each, dtype) for each, dtype in zip(found, ctx.dtypes, strict=True)), None, None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return F.linear(x, weight, bias)
    product = _rows(x) @ weight if bias is None else torch.addmm(bias, _rows(x), weight)
    return product.view(*x.shape[:-1], -1)


def _weight_gradient(saved: SavedInput, grad: Tensor, transposed: bool) -> Tensor | None:
    def of(piece: slice) -> Sums:
        x = saved.rows(piece).to(grad.dtype)
        part = _rows(grad[piece] if x.dim() > 1 else grad)
        return (_rows(x).t() @ part if transposed else part.t() @ _rows(x),)

    return summed(saved.pieces(), of)[0]


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
        output: Tensor = Product.apply(input, self.weight, self.bias, self.transposed, self.packer, self.site)
        return output


class CompressedLinear(Linear, nn.Linear):
    """``nn.Linear``."""
