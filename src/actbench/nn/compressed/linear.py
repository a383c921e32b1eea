"""Linear layers, and transformers' ``Conv1D``, that pack their input whole or as a random sketch of its rows."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actbench.codecs.sketch import Sketching, fresh_sketch, project
from actbench.nn import savedtensors
from actbench.nn.compressed.savedinput import Compressed, SavedInput, Sums, is_differentiated, load, save, summed
from actbench.nn.precision import cast, cast_all, dtypes_of, no_autocast, product_dtype
from actbench.nn.refusals import OWN_BACKWARD, first_order, refuse_exporting
from actbench.nn.replacement import made_class, standing_in
from actbench.nn.savedtensors import SharingTable, WeakTensors
from actbench.ops.library import traced


class Product(torch.autograd.Function):
    """x W^T + b; the gradient of W is computed from the packed x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear) -> Tensor:
        """Return the product in autocast's type, where it is on."""
        ctx.transposed, ctx.shape, ctx.dtypes = layer.transposed, x.shape, dtypes_of(x, weight, bias)
        packed = layer.packer.pack(x, layer.site) if ctx.needs_input_grad[1] else None
        save(ctx, packed, layer, weight if ctx.needs_input_grad[0] else None, by_row=x.dim() > 1)
        return _product(x, weight, bias, product_dtype(x), layer.transposed)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b, where they are wanted."""
        ctx.site.see_gradient(grad)
        saved, (weight,) = load(ctx, grad)
        for_x, for_weight, for_bias = None, None, None
        with no_autocast(grad):
            if ctx.needs_input_grad[1]:
                for_weight = _weight_gradient(saved, grad, ctx.transposed)
            rows = _rows(grad)
            if ctx.needs_input_grad[0]:
                for_x = _input_gradient(ctx, rows, weight)
            if ctx.needs_input_grad[2]:
                for_bias = rows.sum(0)
        return *cast_all((for_x, for_weight, for_bias), ctx.dtypes), None


class SketchedProduct(torch.autograd.Function):
    """x W^T + b, exact except for the gradient of W, which is estimated from a sketch of x.

    The key is saved beside the sketch, not on ``ctx``: under non-re-entrant checkpointing saved tensors come from the
    recomputation but ``ctx`` from the first forward, and sketch and key must have the same seed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sketch: Tensor,
        key: Tensor,
        sketching: Sketching,
        transposed: bool,
    ) -> Tensor:
        """Return the product in the type of the sketch (autocast's, where it is on)."""
        refuse_exporting(*OWN_BACKWARD)
        ctx.sketching, ctx.transposed = sketching, transposed
        ctx.shape, ctx.dtypes = x.shape, dtypes_of(x, weight, bias)
        ctx.save_for_backward(sketch, key, weight if ctx.needs_input_grad[0] else None)
        return _product(x, weight, bias, sketch.dtype, transposed)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b; those of x and b equal the exact layer's."""
        sketch, key, weight = ctx.saved_tensors
        for_x = for_weight = for_bias = None
        with no_autocast(grad):
            rows = _rows(grad)
            if ctx.needs_input_grad[0]:
                for_x = cast(_input_gradient(ctx, rows, weight), ctx.dtypes[0])
            if ctx.needs_input_grad[1]:
                projected = project(rows, key, sketch.shape[0], ctx.sketching.kind).to(sketch.dtype)
                left, right = (sketch, projected) if ctx.transposed else (projected, sketch)
                for_weight = cast(left.t() @ right, ctx.dtypes[1])
            if ctx.needs_input_grad[2]:
                for_bias = rows.sum(0)
        return *cast_all((for_x, for_weight, for_bias), ctx.dtypes), None, None, None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, transposed: bool) -> Tensor:
    with no_autocast(x):
        x, weight, bias = x.to(dtype), weight.to(dtype), cast(bias, dtype)
        if not transposed:
            return F.linear(x, weight, bias)
        product = _rows(x) @ weight if bias is None else torch.addmm(bias, _rows(x), weight)
        return product.view(*x.shape[:-1], -1)


def _input_gradient(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
    weight = weight.to(rows.dtype)
    return (rows @ (weight.t() if ctx.transposed else weight)).view(ctx.shape)


def _weight_gradient(saved: SavedInput, grad: Tensor, transposed: bool) -> Tensor | None:
    def of(piece: slice) -> Sums:
        x = saved.rows(piece).to(grad.dtype)
        part = _rows(grad[piece] if x.dim() > 1 else grad)
        return (_rows(x).t() @ part if transposed else part.t() @ _rows(x),)

    return summed(saved.pieces(), of)[0]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class Linear(Compressed):
    """The forward of a linear layer that packs its input."""

    weight: Tensor
    bias: Any
    transposed: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return (..., d_out) of (..., d_in) as the exact layer does, bit for bit."""
        if input.numel() == 0 or not is_differentiated(input, self.weight, self.bias):
            exact: Tensor = super().forward(input)  # type: ignore[misc]
            return exact
        output: Tensor = Product.apply(input, self.weight, self.bias, self)
        return output


class CompressedLinear(Linear, nn.Linear):
    """``nn.Linear``."""


Sketch = tuple[Tensor, ...]
"""The packed form of X: its sketch, (k, d_in) in the type of the product, and the key that S is made again from.

The key is a 0-d int64 seed on the CPU, 8 bytes, or for ``norm`` and ``wta`` (k,) int32 row numbers, 4 k bytes.
"""


class Sketched(nn.Module):
    """A base class, put before a layer's own class, that saves a sketch in place of the input.

    Attributes:
        sharing: The sketches of the whole model, so that layers with one input share one.
    """

    weight: Tensor
    bias: Any
    sketching: Sketching
    sharing: SharingTable[Sketch]
    transposed: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return (..., d_out) of (..., d_in) as the exact layer does, bit for bit."""
        rows = math.prod(input.shape[:-1])
        size = self.sketching.size(rows)
        if not torch.is_grad_enabled() or not self.weight.requires_grad or size >= rows:
            exact: Tensor = super().forward(input)
            return exact
        sketch, key = self._sketch(input, size)
        product: Tensor = SketchedProduct.apply(
            input, self.weight, self.bias, sketch, key, self.sketching, self.transposed
        )
        return product

    def extra_repr(self) -> str:
        """Add the sketch to the layer's own text."""
        return f"{super().extra_repr()}, {self.sketching}"

    @torch.no_grad()
    def _sketch(self, x: Tensor, size: int) -> Sketch:
        dtype = product_dtype(x)
        if traced():  # a graph has no storages to identify a tensor by
            return self._make(x, size, dtype)
        purpose = (size, self.sketching.kind, dtype)
        sketch = self.sharing.recall(x, purpose)
        if sketch is None:
            sketch = self._make(x, size, dtype)
            self.sharing.remember(x, WeakTensors(*sketch), purpose)
        return sketch

    def _make(self, x: Tensor, size: int, dtype: torch.dtype) -> Sketch:
        with no_autocast(x):
            sketch, key = fresh_sketch(_rows(x), size, self.sketching.kind, dtype)
        savedtensors.packed(x, sketch, key)
        return sketch, key


class SketchedLinear(Sketched, nn.Linear):
    """``nn.Linear`` that packs a sketch of its input."""


def is_conv1d(kind: type[Any]) -> bool:
    """Return whether a class is ``Conv1D`` of transformers: a linear layer with a (d_in, d_out) weight.

    The check is by name, so that a model without it needs no transformers.
    """
    return f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D"


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is exactly ``nn.Linear`` or ``Conv1D``, not a subclass."""
    return type(layer) is nn.Linear or is_conv1d(type(layer))


@functools.cache
def sketched_class(kind: type[Any]) -> type[Sketched] | None:
    """Return the class that replaces exactly ``kind``, or None."""
    if is_conv1d(kind):
        return made_class("SketchedConv1D", (Sketched, kind), sketched_class, kind, transposed=True)
    return SketchedLinear if kind is nn.Linear else None


def sketched(layer: nn.Module, sketching: Sketching, sharing: SharingTable[Sketch]) -> Sketched | None:
    """Return a sketched layer with the identity of ``layer``, or None for a class without a sketched form."""
    kind: type[Any] = type(layer)
    cls = sketched_class(kind)  # type: ignore[arg-type]  # mypy: a Module class is not Hashable
    return None if cls is None else standing_in(layer, cls, sketching=sketching, sharing=sharing)
