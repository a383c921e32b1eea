"""Convolutions and transposed convolutions that pack their input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from actbench.methods.actnn.layers.geometry import Geometry, channels_last
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
from actbench.packing.precision import cast_all, no_autocast, other_dtypes, product_dtype
from actbench.packing.refusals import first_order


class Convolution(torch.autograd.Function):
    """A convolution that computes the gradient of its weight from the packed input.

    It computes this gradient first, and frees the decoded input before it computes the gradient of the input, which
    needs no values: so only one of these two exists beside the gradient of the output. Small inputs are not worth it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        layer: Compressed,
    ) -> Tensor:
        """Return the convolution in autocast's type, where it is on."""
        dtype = product_dtype(x)
        ctx.geometry, ctx.shape, ctx.format = geometry, x.shape, channels_last(x)
        ctx.dtypes = other_dtypes(dtype, x, weight, bias)
        packed = layer.packer.pack(x, layer.site) if ctx.needs_input_grad[1] else None
        if layer.site.watched:
            layer.site.inside = geometry.share_inside(x.shape[-len(geometry.stride) :], weight.shape[2:])
        save(ctx, packed, layer, weight, by_row=geometry.has_batch(x))
        if ctx.dtypes is None and not geometry.pads:  # autocast would pad in float32
            return geometry.forward(x, weight, bias)
        with no_autocast(x):
            found: Any = cast_all((x, weight, bias), (dtype,) * 3)
            return geometry.forward(*found)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are wanted."""
        ctx.site.see_gradient(grad)
        saved, (weight,) = load(ctx, grad)
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        found: list[Tensor | None] = [None, None, None]
        with no_autocast(grad):
            weight = weight if weight.dtype == grad.dtype else weight.to(grad.dtype)
            if for_weight and for_x and _may_be_at_once(ctx, saved):
                found = _gradients_at_once(ctx.geometry, saved, grad, weight, for_bias)
                for_x = False
            elif for_weight:
                found[1:] = _weight_gradients(ctx.geometry, saved, grad, weight, for_bias)
            elif for_bias:
                found[2] = grad.sum(
                    [dim for dim in range(grad.dim()) if dim != grad.dim() - len(ctx.geometry.stride) - 1]
                )
            if for_x:
                found[0] = _input_gradient(ctx, grad, weight)
        return *cast_all(found, ctx.dtypes), None, None


AT_ONCE_BYTES = 2**16
"""Bytes of an input up to which all gradients are computed at once: beside its gradient they do not matter,
and a second operator takes longer than what such tensors are computed in."""


def _may_be_at_once(ctx: Any, saved: SavedInput) -> bool:
    """Return whether an input is so small that it may be there beside its gradient, and is convolved as it is."""
    if ctx.shape.numel() * 4 > AT_ONCE_BYTES or ctx.geometry.pads or not ctx.by_row:
        return False
    return len(saved.pieces()) == 1


def _gradients_at_once(
    geometry: Geometry, saved: SavedInput, grad: Tensor, weight: Tensor, for_bias: bool
) -> list[Tensor | None]:
    """Return the gradients of x, the weight and, where it is wanted, the bias."""
    x = saved.rows(saved.pieces()[0])
    found = geometry.backward(grad, x if x.dtype == grad.dtype else x.to(grad.dtype), weight, (True, True, for_bias))
    return [found[0], found[1], found[2] if for_bias else None]


def _weight_gradients(geometry: Geometry, saved: SavedInput, grad: Tensor, weight: Tensor, for_bias: bool) -> Sums:
    """Return the gradients of the weight and, where it is wanted, of the bias."""

    def of(piece: slice) -> Sums:
        x = saved.rows(piece).to(grad.dtype)
        is_batch = geometry.has_batch(x)
        x, part = (x, rows_of_piece(grad, piece)) if is_batch else (x.unsqueeze(0), grad.unsqueeze(0))
        found = geometry.backward(part, geometry.padded(x), weight, (False, True, for_bias))
        return found[1], found[2] if for_bias else None

    return summed(saved.pieces(), of)


def _input_gradient(ctx: Any, grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of x, which needs no values of x."""
    geometry: Geometry = ctx.geometry
    has_batch = len(ctx.shape) == len(geometry.stride) + 2
    shape = ctx.shape if has_batch else (1, *ctx.shape)
    batch = grad if has_batch else grad.unsqueeze(0)
    found = geometry.input_gradient(batch, geometry.padded_size(shape), weight, ctx.format)
    # an expanded number has a shape and no memory; its values are not read
    for_x = geometry.unpadded(found, grad.new_zeros(()).expand(shape)) if geometry.pads else found
    return for_x if has_batch else for_x.squeeze(0)


class Direct(Compressed):
    """The forward of a convolution that packs its input."""

    weight: Tensor
    bias: Any

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit."""
        if torch.compiler.is_compiling() and self.form is not None:
            return self.in_graph(input)
        geometry, weight, bias = Geometry.of(self), self.weight, self.bias
        is_worth = is_differentiated(input, weight, bias) and input.numel() > 0
        if not (is_worth and geometry.takes(input)):
            exact: Tensor = super().forward(input)
            return exact
        output: Tensor = Convolution.apply(input, weight, bias, geometry, self)
        return output


class Transposed(Compressed):
    """The forward of a transposed convolution that packs its input."""

    groups: int
    stride: tuple[int, ...]
    weight: Tensor
    bias: Any

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002
        """Return what the exact layer returns, bit for bit."""
        if torch.compiler.is_compiling() and self.form is not None:
            return self.in_graph(input, output_size)
        is_worth = is_differentiated(input, self.weight, self.bias) and input.numel() > 0
        if not (is_worth and Geometry.of(self).takes(input)):
            exact: Tensor = super().forward(input, output_size)
            return exact
        layer: Any = self
        # forward of nn.ConvTranspose1d to 3d asks the same private function
        padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, len(layer.stride), layer.dilation
        )
        geometry = Geometry.of(self, padding)
        output: Tensor = Convolution.apply(input, self.weight, self.bias, geometry, self)
        return output


class CompressedConv1d(Direct, nn.Conv1d):
    """``nn.Conv1d``."""


class CompressedConv2d(Direct, nn.Conv2d):
    """``nn.Conv2d``."""


class CompressedConv3d(Direct, nn.Conv3d):
    """``nn.Conv3d``."""


class CompressedConvTranspose1d(Transposed, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d``."""


class CompressedConvTranspose2d(Transposed, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d``."""


class CompressedConvTranspose3d(Transposed, nn.ConvTranspose3d):
    """``nn.ConvTranspose3d``."""
