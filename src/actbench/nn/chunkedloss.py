"""Cross entropy of a linear layer, a piece of the rows at a time: its output never exists as a whole.

The layer returns :class:`Logits`, a tensor of the autograd graph without values, which knows how to compute them.
Reshaping, slicing, casting and scaling by numbers, as in a soft cap, is deferred too. Cross entropy of it is computed
in pieces, and again in the backward pass. Any other use computes the values first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from actbench.errors import ConversionError
from actbench.nn import savedtensors
from actbench.nn.crossentropy import Cast, CrossEntropy, How, Step, done, unpacked
from actbench.nn.forwardwrapper import ReboundForward
from actbench.nn.precision import cast, cast_all, dtypes_of, no_autocast, product_dtype
from actbench.nn.refusals import refuse_compiling

UNCOMPILABLE = ("a model whose loss is computed in pieces", "its logits are a tensor without values")
"""What cannot be compiled, and why."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Recipe:
    """How to compute logits.

    Attributes:
        hidden: The input of the layer, (..., width).
        weight: The layer's, (classes, width).
        bias: The layer's, (classes,), or None.
        dtype: The type that the layer computes in.
        versions: Versions of hidden, weight and bias when the layer was called.
        head: The layer's forward.
        shaping: Deferred steps on the dimensions before the last.
        scaling: Deferred steps on each logit.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    versions: tuple[int, ...]
    head: DeferredHead
    shaping: tuple[Step, ...] = ()
    scaling: tuple[Step, ...] = ()

    @classmethod
    def of(cls, hidden: Tensor, head: DeferredHead) -> Recipe:
        """Return how to compute the output of a layer."""
        weight: Any = head.module.weight
        bias: Any = head.module.bias
        return cls(hidden, weight, bias, product_dtype(hidden), _versions(hidden, weight, bias), head)

    def check(self) -> None:
        """Raise a ConversionError if a tensor that the logits are computed from has changed since."""
        if _versions(self.hidden, self.weight, self.bias) != self.versions:
            raise ConversionError(
                "chunked_loss: the logits are read after their weights, or what went into the head, were changed in "
                "place; read them before the optimizer's step, or leave the scheme out"
            )

    def rows(self) -> Tensor:
        """Return the input with which the layer would return the reshaped logits."""
        return done(self.hidden, self.shaping)

    def values(self) -> Tensor:
        """Return the logits, (..., classes)."""
        self.check()
        with no_autocast(self.hidden):
            x = self.rows().to(self.dtype)
            return done(F.linear(x, self.weight.to(self.dtype), cast(self.bias, self.dtype)), self.scaling)


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors if tensor is not None)


class Logits(Tensor):
    """The output of a linear layer, (..., classes), that is not computed yet."""

    recipe: Recipe

    @staticmethod
    def of(recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype) -> Logits:
        """Return logits without values."""
        make: Any = Tensor._make_wrapper_subclass
        made: Logits = make(Logits, shape, dtype=dtype, device=recipe.hidden.device)
        made.recipe = recipe
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the tensors inside: none, since it has no values."""
        return [], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute cross entropy in pieces; pass anything else on to autograd, then to operators."""
        if func is Tensor.__setitem__ and isinstance(args[0], Logits):
            _refuse_writing()
        if func is F.cross_entropy and isinstance(args[0] if args else None, Logits):
            found = _cross_entropy(*args, **(kwargs or {}))
            if found is not None:
                return found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Defer an operator if possible; else compute the values for it."""
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, Logits):
            if func._schema.is_mutable:
                _refuse_writing()
            later = _later(first, func, args[1:], kwargs)
            if later is not None:
                return later
        args, kwargs = tree_map_only(Logits, lambda logits: logits.recipe.values(), (args, kwargs))
        return func(*args, **kwargs)


def _refuse_writing() -> None:
    raise ConversionError(
        "chunked_loss: the model changes its logits in place, which are not computed yet; leave the scheme out, or "
        "have the model make new ones"
    )


def _later(logits: Logits, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits | None:
    """Return logits with a deferred operator, or None for an operator that cannot be deferred."""
    recipe, shape = logits.recipe, tuple(logits.shape)
    if func in (aten.detach.default, aten.alias.default, aten.clone.default):
        return Logits.of(recipe, shape, logits.dtype)
    if func is aten._to_copy.default and {*kwargs} <= {"dtype"}:
        dtype = kwargs.get("dtype", logits.dtype)
        return Logits.of(replace(recipe, scaling=(*recipe.scaling, Cast(dtype))), shape, dtype)
    by_number = func in (aten.div.Tensor, aten.mul.Tensor) and isinstance(others[0], int | float)
    if by_number or func is aten.tanh.default:
        return Logits.of(replace(recipe, scaling=(*recipe.scaling, lambda x: func(x, *others))), shape, logits.dtype)
    shaping = _shaping(shape, func, others) if not kwargs else None
    if shaping is None:
        return None
    left, step = shaping
    return Logits.of(replace(recipe, shaping=(*recipe.shaping, step)), (*left, shape[-1]), logits.dtype)


def _shaping(shape: tuple[int, ...], func: Any, others: tuple[Any, ...]) -> tuple[list[int], Step] | None:
    """Return the dimensions before the last after an operator, and the step that does the same to the layer's input."""
    if func in (aten.view.default, aten._unsafe_view.default):
        *leading, last = others[0]
        if last != shape[-1]:
            return None
        known = math.prod(size for size in leading if size != -1)
        leading = [math.prod(shape[:-1]) // known if size == -1 else size for size in leading]
        return leading, lambda x: x.reshape(*leading, x.shape[-1])
    if func is not aten.slice.Tensor:
        return None
    dim, cut = others[0] % len(shape) if others else 0, slice(*others[1:])
    size = len(range(*cut.indices(shape[dim])))
    if dim == len(shape) - 1:
        return ([*shape[:-1]], lambda x: x) if size == shape[-1] else None
    return [*shape[:dim], size, *shape[dim + 1 : -1]], lambda x: x[(slice(None),) * dim + (cut,)]


class _Promise(torch.autograd.Function):
    """Logits without values, with the gradient of a linear layer."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype, ctx.dtypes = recipe.dtype, dtypes_of(hidden, weight, bias)
        return Logits.of(recipe, (*hidden.shape[:-1], weight.shape[0]), recipe.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with no_autocast(gradient):
            gradient = gradient.to(ctx.dtype)
            flat, rows = gradient.flatten(0, -2), hidden.flatten(0, -2).to(ctx.dtype)
            to_hidden = gradient @ weight.to(ctx.dtype) if needs[0] else None
            to_weight = flat.T @ rows if needs[1] else None
            to_bias = flat.sum(0) if needs[2] else None
        return *cast_all((to_hidden, to_weight, to_bias), ctx.dtypes), None


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
    """Return the cross entropy in pieces, a scalar, or None for a kind that is not supported."""
    plain = reduction in ("mean", "sum") and weight is None and size_average is None and reduce is None
    if not plain or logits.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    recipe = logits.recipe
    recipe.check()
    savedtensors.acted(recipe.head)
    sources = (recipe.rows(), recipe.weight, recipe.bias)
    if not logits.requires_grad:  # detached, or nothing before the logits is trained
        sources = tuple(None if each is None else each.detach() for each in sources)  # type: ignore[assignment]
    with unpacked():
        how = How(recipe.head.pieces, recipe.dtype, recipe.scaling, ignore_index, label_smoothing)
        amount: Tensor = recipe.head.kind.apply(*sources, target, how)
    recipe.head.losses += 1
    if reduction == "mean":
        amount = amount / (target != ignore_index).sum()
    return amount if torch.is_autocast_enabled(logits.device.type) else amount.to(logits.dtype)


class DeferredHead(ReboundForward):
    """The forward of a linear layer whose output is deferred to the loss; plain outside of training.

    Args:
        module: The ``nn.Linear``.
        pieces: How many pieces the rows of a loss are cut into.
        kind: The function that computes the loss, applied like :class:`CrossEntropy`.

    Attributes:
        losses: How many losses were computed in pieces.
    """

    uncompilable = UNCOMPILABLE

    def __init__(self, module: nn.Module, pieces: int = 1, kind: type[torch.autograd.Function] = CrossEntropy) -> None:
        super().__init__(module)
        self.pieces, self.kind = pieces, kind
        self.losses = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, or deferred logits if gradients are needed in training."""
        module = self.module
        hidden = args[0] if args else kwargs.get("input")
        if not (module.training and torch.is_grad_enabled() and isinstance(hidden, Tensor)):
            return self.inner(module, *args, **kwargs)
        refuse_compiling(*self.uncompilable)
        recipe = Recipe.of(hidden, self)
        with unpacked():
            made: Logits = _Promise.apply(hidden, module.weight, module.bias, recipe)
        return made

    def _twin(self, module: nn.Module) -> DeferredHead:
        return type(self)(module, self.pieces, self.kind)
