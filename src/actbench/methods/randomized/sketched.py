"""Linear layers, and transformers' ``Conv1D``, that pack a random sketch of the rows of their input."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from actbench.methods.actnn.layers.linear import input_gradient, product, rows_of
from actbench.methods.randomized.ops.sketch import Sketching, fresh_sketch, project
from actbench.ops import noise
from actbench.ops.library import traced
from actbench.packing import savedtensors
from actbench.packing.precision import cast, cast_all, no_autocast, other_dtypes, product_dtype
from actbench.packing.refusals import OWN_BACKWARD, first_order, refuse_exporting
from actbench.packing.replacement import is_conv1d, made_class, standing_in
from actbench.packing.savedtensors import SharingTable, WeakTensors


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
        ctx.shape, ctx.dtypes = x.shape, other_dtypes(sketch.dtype, x, weight, bias)
        ctx.save_for_backward(sketch, key, weight if ctx.needs_input_grad[0] else None)
        return product(x, weight, bias, sketch.dtype, transposed)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b; the gradients of x and b equal the exact layer's."""
        sketch, key, weight = ctx.saved_tensors
        for_x = for_weight = for_bias = None
        x_dtype, weight_dtype, _ = ctx.dtypes or (None, None, None)
        with no_autocast(grad):
            rows = rows_of(grad)
            if ctx.needs_input_grad[0]:
                for_x = cast(input_gradient(ctx, rows, weight), x_dtype)
            if ctx.needs_input_grad[1]:
                projected = project(rows, key, sketch.shape[0], ctx.sketching.kind)
                projected = projected if projected.dtype == sketch.dtype else projected.to(sketch.dtype)
                left, right = (sketch, projected) if ctx.transposed else (projected, sketch)
                for_weight = cast(torch.mm(left.t(), right), weight_dtype)
            if ctx.needs_input_grad[2]:
                for_bias = rows.sum(0)
        return *cast_all((for_x, for_weight, for_bias), ctx.dtypes), None, None, None, None


Sketch = tuple[Tensor, ...]
"""The packed form of X: its sketch, (k, d_in) in the type of the product, and the key that S is made again from.

The key is a 0-d int64 seed, 8 bytes, or for ``norm`` and ``wta`` (k,) int32 row numbers, 4 k bytes.
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
        size, weight, has_gradient = self.sketching.size(rows), self.weight, torch.is_grad_enabled()
        if self.training and not has_gradient and not traced():
            noise.begin()  # re-entrant checkpointing runs it again in the backward pass
        if not has_gradient or not weight.requires_grad or size >= rows:
            exact: Tensor = super().forward(input)
            return exact
        sketch, key = self._sketch(input.detach(), size)
        output: Tensor = SketchedProduct.apply(input, weight, self.bias, sketch, key, self.sketching, self.transposed)
        return output

    def extra_repr(self) -> str:
        """Add the sketch to the layer's own text."""
        return f"{super().extra_repr()}, {self.sketching}"

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
            sketch, key = fresh_sketch(rows_of(x), size, self.sketching.kind, dtype)
        if savedtensors.observers:
            savedtensors.packed(x, sketch, key)
        return sketch, key


class SketchedLinear(Sketched, nn.Linear):
    """``nn.Linear`` that packs a sketch of its input."""


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
