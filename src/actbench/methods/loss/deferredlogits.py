"""Logits that are not computed yet: reshaping, slicing, casting and scaling by numbers, as in a soft cap, wait too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.errors import ConversionError
from actbench.methods.loss.deferred import Deferred, DeferredTensor
from actbench.packing.precision import cast, no_autocast, product_dtype

aten = torch.ops.aten


class Step:
    """An operation on logits, and the operation of the backward pass on their gradient that undoes it."""

    on_rows: ClassVar[bool] = False
    """Whether it acts on the dimensions before the last, and does the same to the input of the layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tensor after the step."""
        raise NotImplementedError

    def shape(self, before: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of logits after the step."""
        return before

    def is_undone_by(
        self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any], deferred: DeferredLogits
    ) -> bool:
        """Return whether an operator makes of the gradient of ``deferred``, whose last step this is, that before it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Cast(Step):
    """Casts to a type."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tensor in the type."""
        return x.to(self.dtype)

    def is_undone_by(
        self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any], deferred: DeferredLogits
    ) -> bool:
        """Return whether an operator casts the gradient back."""
        # whatever the operator is told must agree with this, and it must be told a type
        wanted = {"dtype": deferred.before.dtype, "layout": torch.strided, "device": deferred.device}
        return func is aten._to_copy.default and wanted == wanted | kwargs and "dtype" in kwargs


@dataclass(frozen=True)
class _Scale(Step):
    """Multiplies or divides by a number."""

    operator: Any
    number: float

    def __call__(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.operator(x, self.number)
        return scaled

    def is_undone_by(
        self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any], deferred: DeferredLogits
    ) -> bool:
        return func is self.operator and others == (self.number,) and not kwargs


@dataclass(frozen=True)
class _Tanh(Step):
    """Takes the hyperbolic tangent."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.tanh()

    def is_undone_by(
        self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any], deferred: DeferredLogits
    ) -> bool:
        return func is aten.tanh_backward.default and getattr(others[0], "deferred", None) is deferred


@dataclass(frozen=True)
class _Reshape(Step):
    """Gives the dimensions before the last other sizes."""

    on_rows: ClassVar[bool] = True

    leading: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return x.reshape(*self.leading, x.shape[-1])

    def shape(self, before: tuple[int, ...]) -> tuple[int, ...]:
        return *self.leading, before[-1]

    def is_undone_by(
        self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any], deferred: DeferredLogits
    ) -> bool:
        return func in _VIEWS and (*others[0],) == deferred.before.shape


@dataclass(frozen=True)
class _Slice(Step):
    """Cuts a part of a dimension before the last."""

    on_rows: ClassVar[bool] = True

    dim: int
    cut: slice

    def __call__(self, x: Tensor) -> Tensor:
        return x[(slice(None),) * self.dim + (self.cut,)]

    def shape(self, before: tuple[int, ...]) -> tuple[int, ...]:
        return *before[: self.dim], len(range(*self.cut.indices(before[self.dim]))), *before[self.dim + 1 :]

    def is_undone_by(
        self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any], deferred: DeferredLogits
    ) -> bool:
        if func is not aten.slice_backward.default or (*others[0],) != deferred.before.shape:
            return False
        size = deferred.before.shape[self.dim]
        # indices() makes an open end, which torch writes as the largest int64, equal to the size
        return others[1] == self.dim and slice(*others[2:]).indices(size) == self.cut.indices(size)


class _Whole(_Slice):
    """Cuts nothing off the classes."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


_VIEWS = (aten.view.default, aten._unsafe_view.default)


def done(x: Tensor, steps: tuple[Callable[[Tensor], Tensor], ...]) -> Tensor:
    """Apply steps to a tensor, one after the other."""
    for step in steps:
        x = step(x)
    return x


@dataclass(frozen=True, eq=False)
class Source:
    """A call of the layer.

    Attributes:
        hidden: The input of the layer, (..., width).
        weight: The layer's, (classes, width).
        bias: The layer's, (classes,), or None.
        dtype: The type that the layer computes in.
        loss: Computes cross entropy of logits in pieces, with the arguments of ``F.cross_entropy``; returns None for a
            kind that it does not support.
        versions: Versions of hidden, weight and bias when the layer was called.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    loss: Callable[..., Tensor | None]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, hidden: Tensor, layer: Any, loss: Callable[..., Tensor | None]) -> Source:
        """Return a call of a linear layer on ``hidden``."""
        weight, bias = layer.weight, layer.bias
        return cls(hidden, weight, bias, product_dtype(hidden), loss, _versions(hidden, weight, bias))

    def check(self, what: str) -> None:
        """Raise a ConversionError if a tensor that ``what`` is computed from has changed since."""
        if _versions(self.hidden, self.weight, self.bias) != self.versions:
            raise ConversionError(
                f"chunked_loss: {what} are needed after the head's weights, or what went into the head, were changed "
                "in place; read them before the optimizer's step (in a hook, read or clone them there), or leave the "
                "scheme out"
            )


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors if tensor is not None)


@dataclass(frozen=True, eq=False)
class DeferredLogits(Deferred):
    """How to compute logits, (..., classes).

    Attributes:
        source: The call of the layer.
        shaping: Deferred steps on the dimensions before the last.
        scaling: Deferred steps on each logit.
        earlier: The logits before the last step; None for what the layer returns.
        step: The last step.
    """

    what: ClassVar[str] = "the logits"

    source: Source
    shaping: tuple[Step, ...] = ()
    scaling: tuple[Step, ...] = ()
    earlier: DeferredLogits | None = None
    step: Step | None = None

    @classmethod
    def of(cls, source: Source) -> DeferredLogits:
        """Return how to compute what the layer returns."""
        shape = (*source.hidden.shape[:-1], source.weight.shape[0])
        return cls(shape, source.dtype, source.hidden.device, source)

    @property
    def before(self) -> DeferredLogits:
        """The logits before the last step."""
        assert self.earlier is not None
        return self.earlier

    def rows(self) -> Tensor:
        """Return the input with which the layer would return the reshaped logits."""
        return done(self.source.hidden, self.shaping)

    def values(self) -> Tensor:
        """Return the logits."""
        source = self.source
        source.check(self.what)
        with no_autocast(source.hidden):
            x = self.rows().to(source.dtype)
            return done(F.linear(x, source.weight.to(source.dtype), cast(source.bias, source.dtype)), self.scaling)

    def after(self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> DeferredLogits | None:
        """Return how to compute an operator's result on the logits, or None for an operator that needs their values."""
        # a clone without values has no memory of its own to make
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return self
        step = _step(self, func, others, kwargs)
        if step is None:
            return None
        made = replace(self, earlier=self, step=step)
        if isinstance(step, Cast):
            made = replace(made, dtype=step.dtype)
        if not step.on_rows:
            return replace(made, scaling=(*self.scaling, step))
        return replace(made, shape=step.shape(self.shape), shaping=(*self.shaping, step))


def _step(logits: DeferredLogits, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
    """Return the step that an operator is, or None."""
    if func is aten._to_copy.default and {*kwargs} <= {"dtype"}:
        return Cast(kwargs.get("dtype", logits.dtype))
    if kwargs:
        return None
    # a number of Python reaches __torch_dispatch__ as such; a tensor would be a second input
    if func in (aten.div.Tensor, aten.mul.Tensor) and isinstance(others[0], int | float):
        return _Scale(func, others[0])
    if func is aten.tanh.default:
        return _Tanh()
    return _step_on_rows(logits.shape, func, others)


def _step_on_rows(shape: tuple[int, ...], func: Any, others: tuple[Any, ...]) -> Step | None:
    if func in _VIEWS:
        *leading, last = others[0]
        # a view that cuts classes apart has no equal on the input of the layer
        if last != shape[-1]:
            return None
        known = math.prod(size for size in leading if size != -1)
        return _Reshape(tuple(math.prod(shape[:-1]) // known if size == -1 else size for size in leading))
    if func is not aten.slice.Tensor:
        return None
    dim, cut = others[0] % len(shape) if others else 0, slice(*others[1:])
    if dim < len(shape) - 1:
        return _Slice(dim, cut)
    return _Whole(dim, cut) if len(range(*cut.indices(shape[dim]))) == shape[dim] else None


class Logits(DeferredTensor):
    """The output of a linear layer, (..., classes), that is not computed yet."""

    deferred: DeferredLogits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute cross entropy in pieces; pass anything else on to autograd, then to operators."""
        if func is F.cross_entropy and args and isinstance(args[0], Logits):
            found = args[0].deferred.source.loss(*args, **(kwargs or {}))
            if found is not None:
                return found
        return super().__torch_function__(func, types, args, kwargs)
