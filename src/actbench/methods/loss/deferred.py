"""Tensors of the autograd graph that are computed on first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from actbench.errors import ConversionError


@dataclass(frozen=True, eq=False)
class Deferred:
    """How to compute the values of a deferred tensor.

    Attributes:
        shape: The tensor's.
        dtype: The tensor's.
        device: The tensor's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    what: ClassVar[str]
    """Its name in messages, in the plural."""

    def values(self) -> Tensor:
        """Return the values, beneath autograd."""
        raise NotImplementedError

    def after(self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Deferred | None:
        """Return the deferred result of an operator on the tensor, or None for an operator that needs the values."""
        raise NotImplementedError


class DeferredTensor(Tensor):
    """A tensor without values. An operator that its promise does not defer gets the values."""

    deferred: Deferred

    @classmethod
    def of(cls, deferred: Deferred) -> Self:
        """Return a tensor without values."""
        make: Any = Tensor._make_wrapper_subclass
        made: Self = make(cls, deferred.shape, dtype=deferred.dtype, device=deferred.device)
        made.deferred = deferred
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the tensors inside: none, since it has no values."""
        return [], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass everything on to autograd, then to operators."""
        if func is Tensor.__setitem__ and isinstance(args[0], DeferredTensor):
            _refuse_writing(args[0].deferred)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            if (
                func in _MAKE_LEAVES
                and isinstance(args[0], DeferredTensor)
                and args[0].requires_grad
                and args[0].is_leaf
            ):
                args[0].register_hook(_computed)  # type: ignore[no-untyped-call]
            return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Defer an operator if possible; else compute the values for it."""
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, DeferredTensor):
            if func._schema.is_mutable:
                _refuse_writing(first.deferred)
            later = first.deferred.after(func, args[1:], kwargs)
            if later is not None:
                return type(first).of(later)
        args, kwargs = tree_map_only(DeferredTensor, lambda each: each.deferred.values(), (args, kwargs))
        return func(*args, **kwargs)


_MAKE_LEAVES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def _computed(gradient: Tensor) -> Tensor:
    """Return the values of the gradient of a leaf, which may be read as long as the leaf is there."""
    return gradient.deferred.values() if isinstance(gradient, DeferredTensor) else gradient


def _refuse_writing(deferred: Deferred) -> None:
    raise ConversionError(
        f"chunked_loss: {deferred.what} are changed in place before they are computed; make new tensors of them, or "
        "leave the scheme out"
    )
