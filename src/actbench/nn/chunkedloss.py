"""Cross entropy of a linear layer whose output never exists as a whole: a piece of the rows at a time.

The layer returns :class:`Logits`, a tensor without values that knows what they would be computed from. Reshaping,
casting and elementwise functions of it, such as a soft cap, wait too. Cross entropy of it is computed in pieces, and
again in the backward pass. Whatever else is asked of it makes the values first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from actbench.errors import ConversionError
from actbench.nn import savedtensors
from actbench.nn.forwardwrapper import ReboundForward
from actbench.nn.precision import cast, no_autocast, product_dtype
from actbench.nn.refusals import first_order, refuse_compiling

UNCOMPILABLE = ("a model whose loss is computed in pieces", "its logits are a tensor without values")
"""What cannot be compiled, and why."""

_ELEMENTWISE = frozenset(
    (
        *(Tensor.float, Tensor.to, Tensor.type, Tensor.tanh, torch.tanh),
        *(Tensor.div, Tensor.mul, torch.div, torch.mul),
        *(Tensor.__truediv__, Tensor.__mul__, Tensor.__rmul__),
    )
)
_ASKING = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda")),
    )
)


@dataclass(frozen=True)
class Recipe:
    """What logits are computed from.

    Attributes:
        hidden: What the layer is called with, (..., width).
        head: The layer.
        pieces: Into how many pieces the rows are cut.
        functions: What is done to the logits after the layer, elementwise.
    """

    hidden: Tensor
    head: DeferredHead
    pieces: int
    functions: tuple[Callable[[Tensor], Tensor], ...] = ()

    def values(self) -> Tensor:
        """Return the logits, (..., classes)."""
        head = self.head.module
        return self.finish(F.linear(self.hidden, head.weight, head.bias))  # type: ignore[arg-type]

    def finish(self, logits: Tensor) -> Tensor:
        """Return what becomes of the layer's output."""
        for function in self.functions:
            logits = function(logits)
        return logits


class Logits(Tensor):
    """The output of a linear layer, (..., classes), that is not computed yet."""

    recipe: Recipe

    @staticmethod
    def of(recipe: Recipe, dtype: torch.dtype) -> Logits:
        """Return the logits of a recipe, whose values would be of a type."""
        shape = (*recipe.hidden.shape[:-1], recipe.head.module.weight.shape[0])  # type: ignore[index]
        make: Any = Tensor._make_wrapper_subclass
        made: Logits = make(Logits, shape, dtype=dtype, device=recipe.hidden.device)
        made.recipe = recipe
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let what can wait wait, compute cross entropy in pieces, and make the values for anything else."""
        kwargs = kwargs or {}
        if func in _ASKING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first, *others = args or (None,)
        if isinstance(first, Logits) and not any(isinstance(leaf, Logits) for leaf in tree_leaves((others, kwargs))):
            found = _cross_entropy(first, *others, **kwargs) if func is F.cross_entropy else None
            found = _later(first, func, others, kwargs) if found is None else found
            if found is not None:
                return found
        _refuse_writing(getattr(func, "__name__", ""))
        args, kwargs = tree_map_only(Logits, lambda logits: logits.recipe.values(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make the values for an operator that did not come by :meth:`__torch_function__`."""
        args, kwargs = tree_map_only(Logits, lambda logits: logits.recipe.values(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _refuse_writing(name: str) -> None:
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
        raise ConversionError(
            f"chunked_loss: the model changes its logits in place ({name}), which are not computed yet; leave the "
            "scheme out, or have the model make new ones"
        )


def _later(logits: Logits, func: Any, others: list[Any], kwargs: dict[str, Any]) -> Logits | None:
    """Return logits of which a function is still to be computed, or None for one that cannot wait."""
    recipe = logits.recipe
    shapes = [leaf.dim() for leaf in tree_leaves((others, kwargs)) if isinstance(leaf, Tensor)]
    if func in _ELEMENTWISE and not any(shapes):
        like = func(torch.empty(0, dtype=logits.dtype, device=logits.device), *others, **kwargs)
        functions = (*recipe.functions, lambda values: func(values, *others, **kwargs))
        return Logits.of(replace(recipe, functions=functions), like.dtype)
    hidden = _shaped(recipe.hidden, logits.shape, func, others) if not kwargs else None
    return None if hidden is None else Logits.of(replace(recipe, hidden=hidden), logits.dtype)


def _shaped(hidden: Tensor, shape: torch.Size, func: Any, others: list[Any]) -> Tensor | None:
    """Return what the layer would be called with to give a reshaped or cut output, or None for other functions."""
    if func is Tensor.contiguous:
        return hidden
    if func in (Tensor.view, Tensor.reshape):
        *leading, last = others[0] if isinstance(others[0], tuple | list | torch.Size) else others
        return hidden.reshape(*leading, hidden.shape[-1]) if last == shape[-1] else None
    if func in (Tensor.flatten, torch.flatten) and len(others) == 2:
        end = others[1] % len(shape)
        return hidden.flatten(others[0], end) if end < len(shape) - 1 else None
    if func is not Tensor.__getitem__:
        return None
    index = others[0] if isinstance(others[0], tuple) else (others[0],)
    if not all(isinstance(each, int | slice) or each is Ellipsis for each in index):
        return None
    reaches_last = len(index) - (Ellipsis in index) == len(shape) or (index[-1:] != (Ellipsis,) and Ellipsis in index)
    return hidden[index] if not reaches_last or index[-1] == slice(None) else None


def _cross_entropy(
    logits: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the cross entropy in pieces, a scalar, or None where it is of another kind."""
    plain = reduction in ("mean", "sum") and weight is None and size_average is None and reduce is None
    if not plain or logits.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    recipe = logits.recipe
    savedtensors.acted(recipe.head)
    head = recipe.head.module
    amount = _Pieces.apply(recipe.hidden, head.weight, head.bias, target, recipe, (ignore_index, label_smoothing))
    if reduction == "mean":
        amount = amount / (target != ignore_index).sum()
    return amount.to(logits.dtype)  # type: ignore[no-any-return]


class _Pieces(torch.autograd.Function):
    """Sum of the cross entropy of all rows, in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, recipe: Recipe, options: Any
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.recipe = replace(recipe, hidden=hidden.new_empty(0))
        ctx.options, ctx.dtype = options, product_dtype(hidden)
        total = torch.zeros((), dtype=_wide(hidden.dtype), device=hidden.device)
        with no_autocast(hidden):
            matrix, offset = weight.to(ctx.dtype), cast(bias, ctx.dtype)
            for x, y in _pieces(hidden, target, recipe.pieces):
                total += _loss(F.linear(x.to(ctx.dtype), matrix, offset), y, recipe, options)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        needs = ctx.needs_input_grad
        to_hidden = torch.empty_like(hidden) if needs[0] else None
        to_weight = torch.zeros_like(weight) if needs[1] else None
        to_bias = torch.zeros_like(bias) if needs[2] else None
        with no_autocast(hidden):
            matrix, offset = weight.to(ctx.dtype), cast(bias, ctx.dtype)
            first = 0
            for x, y in _pieces(hidden, target, ctx.recipe.pieces):
                x = x.to(ctx.dtype)
                with torch.enable_grad():
                    logits = F.linear(x, matrix, offset).detach().requires_grad_()
                    loss = _loss(logits, y, ctx.recipe, ctx.options)
                (found,) = torch.autograd.grad(loss, logits, gradient)
                del logits, loss
                if to_hidden is not None:
                    to_hidden[first : first + len(x)] = found @ matrix
                if to_weight is not None:
                    _add_product(to_weight, found, x)
                if to_bias is not None:
                    to_bias += found.sum(0)
                first += len(x)
        return to_hidden, to_weight, to_bias, None, None, None


def _pieces(hidden: Tensor, target: Tensor, pieces: int) -> Iterator[tuple[Tensor, Tensor]]:
    rows = -(-len(hidden) // pieces) or 1
    return zip(torch.split(hidden, rows), torch.split(target, rows), strict=True)


def _loss(logits: Tensor, target: Tensor, recipe: Recipe, options: tuple[int, float]) -> Tensor:
    finished = recipe.finish(logits)
    finished = finished.to(_wide(finished.dtype))
    return F.cross_entropy(finished, target, ignore_index=options[0], reduction="sum", label_smoothing=options[1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _add_product(total: Tensor, found: Tensor, x: Tensor) -> None:
    """Add ``found.T @ x`` to a gradient."""
    if total.dtype == found.dtype:
        total.addmm_(found.T, x)
    else:
        total += found.T @ x


class DeferredHead(ReboundForward):
    """The forward of a linear layer whose output waits until a loss is asked of it; plain outside of training.

    Args:
        module: The ``nn.Linear``.
        pieces: Into how many pieces the rows of a loss are cut.
    """

    def __init__(self, module: nn.Module, pieces: int = 1) -> None:
        super().__init__(module)
        self.pieces = pieces

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, or a promise of it where gradients are wanted in training."""
        module = self.module
        hidden = args[0] if args else kwargs.get("input")
        if not (module.training and torch.is_grad_enabled() and isinstance(hidden, Tensor)):
            return self.inner(module, *args, **kwargs)
        refuse_compiling(*UNCOMPILABLE)
        return Logits.of(Recipe(hidden, self, self.pieces), product_dtype(hidden))

    def _twin(self, module: nn.Module) -> DeferredHead:
        return type(self)(module, self.pieces)
