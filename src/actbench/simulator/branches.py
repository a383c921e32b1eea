"""Derivatives whose formulas look at values, by the branch of ordinary values: numbers that are neither zero nor NaN.

torch's formulas take another, slower branch for tensors of other classes, such as fake ones, which must not be looked
at. The derivatives here are the operators that torch runs for real tensors, whose factors hold no zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

aten = torch.ops.aten


@dataclass(frozen=True)
class Branch:
    """A kernel of autograd with another backward pass; torch's own runs where other derivatives are asked for.

    Attributes:
        own: torch's kernel.
        applies: Whether ``kernel`` runs on arguments.
    """

    kernel: Callable[..., Any]
    own: Any
    applies: Callable[..., bool]

    @classmethod
    def of(
        cls, operator: str, kernel: Callable[..., Any], applies: Callable[..., bool] = lambda *args, **kwargs: True
    ) -> Branch:
        """Return the branch of an operator of torch, by its name."""
        # torch's generated kernels are the same for every backend, so that those of the CPU stand for those of CUDA
        return cls(kernel, torch.library.get_kernel(f"aten::{operator}", "AutogradCPU"), applies)

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Run on arguments; ``keys`` are those by which torch came here."""
        # torch's own kernel knows what stands behind a tensor of torch.func's transforms or of forward mode
        transformed = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
        if transformed or not self.applies(*args, **kwargs):
            return self.own.call_boxed(keys, *args, **kwargs)
        return self.kernel(*args, **kwargs)


def composites() -> dict[str, Callable[..., Any]]:
    """Return what replaces composite operators on every device, by their names."""
    return {"cumprod_backward": _cumprod_backward}


def branches() -> dict[str, Branch]:
    """Return what replaces other operators on every device, by their names."""
    return {"prod": Branch.of("prod", _prod), "prod.dim_int": Branch.of("prod.dim_int", _prod_of_dim)}


def branches_on_cpu() -> dict[str, Branch]:
    """Return what replaces further operators on a CPU: of these formulas, CUDA's are those of fake tensors."""
    return {name: Branch.of(name, _selecting(name)) for name in ("max", "min", "median", "nanmedian")}


def _cumprod_backward(grad: Tensor, x: Tensor, dim: int, output: Tensor) -> Tensor:
    if x.dim() == 0 or x.numel() == 0 or x.shape[dim] == 1:
        return grad
    weighted = output.conj() * grad
    is_zero = x == 0
    # torch reads this value to choose the branch (FunctionsManual.cpp, cumprod_backward); here only its bytes count
    is_zero.any()
    turned = weighted.flip(dim)
    summed = turned.cumsum(dim)
    return summed.flip(dim).div_(x.conj())


def _below_autograd(operator: Any, *args: Any, **kwargs: Any) -> Tensor:
    # without a node of the operator's own: the Function around it makes one
    with torch._C._AutoDispatchBelowAutograd():
        result: Tensor = operator(*args, **kwargs)
    return result


class _Prod(Function):
    """A product over all dimensions, or over ``dim``, kept as one of size 1."""

    @staticmethod
    def forward(x: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return _below_autograd(aten.prod.default, x)
        return _below_autograd(aten.prod.dim_int, x, dim, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.dim = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, result = ctx.saved_tensors
        if ctx.dim is None:
            # as prod_backward of FunctionsManual.cpp, copy included
            return grad.clone() if x.dim() == 0 else grad * (result / x).conj(), None
        is_zero = x == 0
        counts = is_zero.sum(ctx.dim, True)
        # torch reads this sum to choose the branch (FunctionsManual.cpp, prod_backward); here only its bytes count
        counts.sum()
        return grad * (result / x).conj(), None


def _prod(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    result: Tensor = _Prod.apply(_summable(x, dtype), None)
    return result


def _prod_of_dim(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    result: Tensor = _Prod.apply(_summable(x, dtype), dim)
    return result if keepdim or x.dim() == 0 else result.squeeze(dim)


def _summable(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    asked = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    return x.to(asked)


def _selecting(name: str) -> Callable[[Tensor], Tensor]:
    """Return an operator that selects one element, with the derivative of a CPU: equal elements share the gradient."""
    operator = getattr(aten, name).default

    class Selected(Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return _below_autograd(operator, x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs, output)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x, value = ctx.saved_tensors
            # evenly_distribute_backward of FunctionsManual.cpp; on CUDA it multiplies a mask
            chosen = x == value
            shared = torch.zeros_like(x)
            return shared.masked_fill_(chosen, grad / chosen.sum())

    return Selected.apply  # type: ignore[no-any-return]
