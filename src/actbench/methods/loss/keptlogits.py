"""Cross entropy a piece of the rows at a time, of logits that are kept in the type in which the layer makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.methods.loss.crossentropy import How, Loss, gradient_of, loss_of, pieces_of
from actbench.methods.loss.deferred import DeferredTensor
from actbench.packing.precision import cast, no_autocast, wide
from actbench.packing.refusals import first_order


class KeptLogits(torch.autograd.Function):
    """Sum of the cross entropy of deferred logits, as torchtune computes it: only a piece is cast to float32 at a time.

    The logits are kept for the backward pass, (rows, classes) in the type of the product; neither a float32 copy nor
    the softmax is.
    """

    @staticmethod
    def forward(ctx: Any, logits: DeferredTensor, target: Tensor, how: How) -> Tensor:
        """Return the sum."""
        deferred: Any = logits.deferred
        source, hidden = deferred.source, deferred.rows()
        total, kept = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device), list[Tensor]()
        with no_autocast(hidden):
            matrix, offset = source.weight.to(source.dtype), cast(source.bias, source.dtype)
            for x, y in pieces_of(hidden, target, how.pieces):
                kept.append(F.linear(x.to(source.dtype), matrix, offset))
                total += loss_of(kept[-1], y, deferred, how)
        ctx.save_for_backward(target, *(kept if logits.requires_grad else ()))
        ctx.deferred, ctx.how = deferred, how
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, which is not computed yet."""
        target, *kept = ctx.saved_tensors
        # nothing public tells whether backward() was called with retain_graph=True
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        loss = _KeptLoss(ctx.deferred, target, ctx.how, gradient, dict(enumerate(kept)), again)
        return DeferredTensor.of(gradient_of(ctx, loss)), None, None


@dataclass(frozen=True, eq=False)
class _KeptLoss(Loss):
    """A loss whose logits were kept.

    Attributes:
        kept: Those of each piece.
        again: Whether they are needed once more.
    """

    kept: dict[int, Tensor]
    again: bool

    def piece(self, index: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of a piece, and forget them if they are not needed again."""
        return self.kept[index] if self.again else self.kept.pop(index)
