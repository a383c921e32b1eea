"""Cross entropy of a linear layer's output by Liger's kernels, an optional package (Hsu et al., arXiv 2410.10989)."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actbench.errors import ConversionError, MeasurementError
from actbench.methods.loss.crossentropy import How, Loss, gradient_of
from actbench.methods.loss.promised import Promised
from actbench.methods.loss.promisedlogits import Cast
from actbench.packing.precision import no_autocast
from actbench.packing.refusals import first_order

UNTRACEABLE = "Liger's kernels are no operators of torch, so that fake tensors show nothing of what they allocate"


@functools.cache
def kernels() -> Any:
    """Return Liger's class of the loss; raise a MeasurementError if Liger is not installed."""
    try:
        return importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise MeasurementError(
            f'chunked_loss:liger needs liger-kernel: pip install "actbench[liger]" ({error})'
        ) from None


def check(device: torch.device) -> None:
    """Raise a MeasurementError if the kernels are not installed, or do not run on a device.

    With ``TRITON_INTERPRET=1`` triton runs them slowly on a CPU, for inspection.
    """
    kernels()
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise MeasurementError(
            f"chunked_loss:liger runs on CUDA, and the model is on {device.type}; take --meter cuda, or "
            "chunked_loss without it"
        )


class LigerCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropy of promised logits; forward computes the gradients of the layer too."""

    @staticmethod
    def forward(ctx: Any, logits: Promised, target: Tensor, how: How) -> Tensor:
        """Return the sum, float32; raise a ConversionError if logits are changed between the layer and the loss."""
        recipe: Any = logits.promise
        if not all(isinstance(step, Cast) for step in recipe.scaling):
            raise ConversionError(
                "chunked_loss:liger: the model scales or caps its logits, which Liger's kernels do not do here; "
                "take chunked_loss without liger"
            )
        loss = kernels()(ignore_index=how.ignore_index, label_smoothing=how.smoothing, reduction="sum")
        source = recipe.source
        given = recipe.rows(), source.weight, source.bias
        trained = (source.hidden, *given[1:])
        needs = [logits.requires_grad and each is not None and each.requires_grad for each in trained]
        asked = (any(needs), *needs[1:])  # without the gradient of the input Liger computes none
        with torch.enable_grad(), no_autocast(target):
            x, w, b = (_leaf(each, source.dtype, ask) for each, ask in zip(given, asked, strict=True))
            total: Tensor = loss(w, x, target, b)
            wanted = [leaf for leaf, need in zip((x, w, b), needs, strict=True) if need and leaf is not None]
            found = iter(torch.autograd.grad(total, wanted) if wanted else ())
        ctx.save_for_backward(target, *(next(found) if need else None for need in needs))
        ctx.recipe, ctx.how = recipe, how
        return total.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, which is not computed yet."""
        target, *found = ctx.saved_tensors
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        loss = _LigerLoss(ctx.recipe, target, ctx.how, gradient, found, again)
        return Promised.of(gradient_of(ctx, loss)), None, None


@dataclass(frozen=True, eq=False)
class _LigerLoss(Loss):
    """A loss whose gradients were computed in the forward pass.

    Attributes:
        found: Those of rows, weight and bias, for a gradient of 1.
        again: Whether they are needed once more.
    """

    found: list[Tensor | None]
    again: bool

    def to_source(self, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias of the layer."""
        scale = torch.mul if self.again else Tensor.mul_
        rows, *others = (None if each is None else scale(each, self.gradient.to(each.dtype)) for each in self.found)
        return self.unshaped(rows), *others


def _leaf(tensor: Tensor | None, dtype: torch.dtype, asked: bool) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(dtype).requires_grad_(asked)
