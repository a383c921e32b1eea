"""Cross entropy of a linear layer, a piece of the rows at a time: its output never exists as a whole.

The layer returns :class:`Logits`, a tensor of the autograd graph without values, which knows how to compute them.
Cross entropy of it is computed in pieces, and again in the backward pass, whose gradient of the logits is a tensor
without values too. Any other use of either computes the values first.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from actbench.methods.loss.crossentropy import CrossEntropy, How, Slopes, unpacked
from actbench.methods.loss.deferred import DeferredTensor
from actbench.methods.loss.deferredlogits import DeferredLogits, Logits, Source
from actbench.packing import savedtensors
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.precision import cast_all, dtypes_of, no_autocast
from actbench.packing.refusals import refuse_compiling

UNCOMPILABLE = ("a model whose loss is computed in pieces", "its logits are a tensor without values")
"""What cannot be compiled, and why."""


class _Head(torch.autograd.Function):
    """A linear layer that returns logits without values."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: Source) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.set_materialize_grads(False)  # zeros for a missing gradient would be as large as the logits
        ctx.source, ctx.dtypes = weakref.ref(source), dtypes_of(hidden, weight, bias)
        ctx.dtype = source.dtype
        return Logits.of(DeferredLogits.of(source))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        hidden, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with no_autocast(gradient):
            if isinstance(gradient, DeferredTensor):
                slopes: Any = gradient.deferred
                if isinstance(slopes, Slopes) and slopes.logits.step is None and slopes.logits.source is ctx.source():
                    return *cast_all(slopes.to_source(needs), ctx.dtypes), None
                gradient = slopes.values()
            gradient = gradient.to(ctx.dtype)
            flat, rows = gradient.flatten(0, -2), hidden.flatten(0, -2).to(ctx.dtype)
            to_hidden = gradient @ weight.to(ctx.dtype) if needs[0] else None
            to_weight = flat.T @ rows if needs[1] else None
            to_bias = flat.sum(0) if needs[2] else None
        return *cast_all((to_hidden, to_weight, to_bias), ctx.dtypes), None


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
        source = Source.of(hidden, module, self._loss)
        with unpacked():
            made: Logits = _Head.apply(hidden, module.weight, module.bias, source)
        return made

    def _loss(
        self,
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
        logits.deferred.source.check("the logits")
        savedtensors.acted(self)
        with unpacked():
            amount: Tensor = self.kind.apply(logits, target, How(self.pieces, ignore_index, label_smoothing))
        self.losses += 1
        if reduction == "mean":
            amount = amount / (target != ignore_index).sum()
        return amount if torch.is_autocast_enabled(logits.device.type) else amount.to(logits.dtype)
