"""A linear layer with a frozen weight in a number format, unpacked for each forward and each backward pass."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from actbench.errors import ConversionError
from actbench.methods.formats.encodings import Encoding, Parts
from actbench.ops.noise import fresh_seed
from actbench.packing.precision import cast, cast_all, dtypes_of, no_autocast, product_dtype
from actbench.packing.refusals import OWN_BACKWARD, first_order, refuse_exporting
from actbench.packing.replacement import carry_hooks, is_conv1d


class _Product(torch.autograd.Function):
    """x W^T + b for a packed W without a gradient; it saves the parts of W, which the layer holds anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, shape: tuple[int, ...], encoding: Encoding, *parts: Tensor
    ) -> Tensor:
        """Return the product in autocast's type, where it is on."""
        refuse_exporting(*OWN_BACKWARD)
        ctx.save_for_backward(*parts)
        ctx.shape, ctx.encoding, ctx.dtypes = shape, encoding, dtypes_of(x, bias)
        return _product(x, encoding.decode(parts, shape, product_dtype(x)), bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and b, where they are wanted."""
        parts, for_x, for_bias = ctx.saved_tensors, None, None  # checkpointing returns saved tensors only once
        with no_autocast(grad):
            if ctx.needs_input_grad[0]:
                for_x = grad @ ctx.encoding.decode(parts, ctx.shape, grad.dtype)
            if ctx.needs_input_grad[1]:
                for_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return *cast_all((for_x, for_bias), ctx.dtypes), None, None, *(None for _ in parts)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with no_autocast(x):
        return F.linear(x.to(weight.dtype), weight, cast(bias, weight.dtype))


@lru_cache(maxsize=64)
def _parts_like(shape: torch.Size, encoding: Encoding) -> Parts:
    """Return parts without values; a model has many matrices of one shape."""
    with unset_fake_temporarily():
        return encoding.encode(torch.empty(shape, device="meta"), torch.zeros((), dtype=torch.int64, device="meta"))


class FrozenLinear(nn.Module):
    """``nn.Linear``, or transformers' ``Conv1D``, with a frozen weight in a number format.

    The parts of the weight are frozen parameters ``packed_weight.0``, ``packed_weight.1``, …: saved, moved and sharded
    like any parameter, but never cast. The bias stays as it is.

    Args:
        layer: The layer, whose hooks and train/eval flag are taken over; afterwards its weight may be freed.
        encoding: The format.
        own_type: Whether products are computed in the weight's type and returned in that of the inputs, as
            bitsandbytes' layers do; by default they are computed in the type of the inputs.
        flat: How many parts, from the first, are parameters of the weight's type, of the same bits; those after them
            are buffers. By default all are parameters of types of their own.

    Raises:
        ValueError: The bytes of such a part are no multiple of those of a number of the weight's type.
    """

    def __init__(
        self, layer: nn.Module, encoding: Encoding, *, own_type: bool = False, flat: int | None = None
    ) -> None:
        super().__init__()
        weight: Any = layer.weight
        self.transposed = is_conv1d(type(layer))
        self.encoding, self.dtype, self.own_type = encoding, weight.dtype, own_type
        matrix = weight.detach().t() if self.transposed else weight.detach()
        self.out_features, self.in_features = matrix.shape
        if isinstance(matrix, FakeTensor):  # its values cannot be asked for, so its parts are fake too
            parts = tuple(
                matrix.new_empty(part.shape, dtype=part.dtype) for part in _parts_like(matrix.shape, encoding)
            )
        else:
            parts = encoding.encode(matrix, fresh_seed(matrix))
        self._types = tuple(part.dtype for part in parts[:flat]) if flat else ()
        if odd := [part for part in parts[:flat] if part.nbytes % self.dtype.itemsize]:
            raise ValueError(f"{odd[0].nbytes} bytes of codes are no whole numbers of {self.dtype}")
        stored = (part.contiguous().view(self.dtype) if flat else part for part in parts[:flat])
        self.packed_weight = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in stored)
        for index, part in enumerate(parts[len(self.packed_weight) :], len(self.packed_weight)):
            self.register_buffer(f"packed_weight_{index}", part)
        self.bias: Any = layer.bias
        carry_hooks(layer, self)

    @property
    def weight(self) -> Tensor:
        """The weight, unpacked at each access; writes into it are lost."""
        matrix = self.encoding.decode(self._parts, self._shape, self.dtype)
        return matrix.t() if self.transposed else matrix

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., d_out) of (..., d_in), in the type of x or autocast's."""
        return self._product(x.to(self.dtype)).to(x.dtype) if self.own_type else self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        wanted = (tensor is not None and tensor.requires_grad for tensor in (x, self.bias))
        if not (torch.is_grad_enabled() and any(wanted)):
            return _product(x, self.encoding.decode(self._parts, self._shape, product_dtype(x)), self.bias)
        output: Tensor = _Product.apply(x, self.bias, self._shape, self.encoding, *self._parts)
        return output

    def extra_repr(self) -> str:
        """Return the text of ``nn.Linear``, with the format."""
        features = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{features}, weight in {self.encoding.spec}"

    @property
    def _parts(self) -> Parts:
        if not self._types:
            return tuple(self.packed_weight)
        if changed := {part.dtype for part in self.packed_weight} - {self.dtype}:
            raise ConversionError(
                f"qlora: codes stored as {self.dtype} were cast to {changed.pop()}, which destroys them: leave "
                "out what casts parameters, as mixed= of another type"
            )
        rest = (part for name, part in self.named_buffers(recurse=False) if name.startswith("packed_weight_"))
        return *(part.view(own) for part, own in zip(self.packed_weight, self._types, strict=True)), *rest

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features
