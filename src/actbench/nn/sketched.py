"""Linear layers that keep a random sketch of their input for the gradient of their weight."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actbench.codecs.sketch import Sketching, fresh_sketch, project
from actbench.nn import savedtensors
from actbench.nn.precision import no_autocast, product_dtype
from actbench.nn.refusals import first_order
from actbench.nn.replacement import inherit
from actbench.nn.sharing import SharingTable, WeakTensors
from actbench.ops.library import traced

Sketch = tuple[Tensor, ...]
"""What is kept of X: its sketch, (k, d_in) in the type of the product, and the key that S is made again from.

The key is a 0-d int64 seed on the CPU, 8 bytes, or for ``norm`` and ``wta`` (k,) int32 row numbers, 4 k bytes.
"""


class SketchedProduct(torch.autograd.Function):
    """x W^T + b, exact in all but the gradient of W, which is estimated from a sketch of x.

    The key is saved beside the sketch and not on ``ctx``: under non-re-entrant checkpointing saved tensors come from
    the recomputation and ``ctx`` from the first forward, and a sketch of one seed must not meet the other.
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
        ctx.sketching, ctx.transposed, ctx.shape, ctx.types = sketching, transposed, x.shape, (x.dtype, weight.dtype)
        ctx.save_for_backward(sketch, key, weight if ctx.needs_input_grad[0] else None)
        with no_autocast(x):
            x, weight = x.to(sketch.dtype), weight.to(sketch.dtype)
            bias = None if bias is None else bias.to(sketch.dtype)
            if transposed:
                return torch.addmm(cast("Tensor", bias), x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
            return F.linear(x, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b; those of x and b as the exact layer's."""
        sketch, key, weight = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.types
        for_x = for_weight = for_bias = None
        with no_autocast(grad):
            rows = grad.reshape(-1, grad.shape[-1])
            if ctx.needs_input_grad[0]:
                weight = weight.to(rows.dtype)
                for_x = (rows @ (weight.t() if ctx.transposed else weight)).view(ctx.shape).to(x_dtype)
            if ctx.needs_input_grad[1]:
                projected = project(rows, key, sketch.shape[0], ctx.sketching.kind).to(sketch.dtype)
                left, right = (sketch, projected) if ctx.transposed else (projected, sketch)
                for_weight = (left.t() @ right).to(weight_dtype)
            if ctx.needs_input_grad[2]:
                for_bias = rows.sum(0).to(weight_dtype)
        return for_x, for_weight, for_bias, None, None, None, None


class Sketched(nn.Module):
    """What a layer gains when its class is put before its own: the sketch in place of the saved input.

    Attributes:
        sketching: Size and kind of the sketch.
        sharing: The sketches of the whole model, so that layers with one input keep one.
    """

    weight: Tensor
    bias: Any
    sketching: Sketching
    sharing: SharingTable[Sketch]
    transposed: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit.

        Args:
            input: (..., d_in).

        Returns:
            (..., d_out).
        """
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
        """Add the sketch to what the layer says of itself."""
        return f"{super().extra_repr()}, {self.sketching}"

    @torch.no_grad()
    def _sketch(self, x: Tensor, size: int) -> Sketch:
        dtype = product_dtype(x)
        if traced():  # a graph has no storages to know a tensor by
            return self._make(x, size, dtype)
        purpose = (size, self.sketching.kind, dtype)
        sketch = self.sharing.recall(x, purpose)
        if sketch is None:
            sketch = self._make(x, size, dtype)
            self.sharing.remember(x, WeakTensors(*sketch), purpose)
        return sketch

    def _make(self, x: Tensor, size: int, dtype: torch.dtype) -> Sketch:
        with no_autocast(x):
            sketch, key = fresh_sketch(x.reshape(-1, x.shape[-1]), size, self.sketching.kind, dtype)
        savedtensors.packed(x, sketch, key)
        return sketch, key


class SketchedLinear(Sketched, nn.Linear):
    """``nn.Linear`` that keeps a sketch of its input."""


@functools.cache
def sketched_class(kind: type[Any]) -> type[Sketched] | None:
    """Return the class that stands in for exactly ``kind``, or None.

    ``Conv1D`` of transformers (a linear layer with a (d_in, d_out) weight) is known by its name, so that a model
    without it needs no transformers.
    """
    if kind is nn.Linear:
        return SketchedLinear
    if f"{kind.__module__}.{kind.__qualname__}" == "transformers.pytorch_utils.Conv1D":
        return type("SketchedConv1D", (Sketched, kind), {"transposed": True, "__module__": __name__})
    return None


def sketched(layer: nn.Module, sketching: Sketching, sharing: SharingTable[Sketch]) -> Sketched | None:
    """Return a sketched layer with the identity of ``layer``, or None for a class that has no sketched form."""
    kind: type[Any] = type(layer)
    cls = sketched_class(kind)  # type: ignore[arg-type]  # mypy: a Module class is not Hashable
    if cls is None:
        return None
    new = cls.__new__(cls)
    nn.Module.__init__(new)
    new.sketching, new.sharing = sketching, sharing
    inherit(new, layer)
    return new
