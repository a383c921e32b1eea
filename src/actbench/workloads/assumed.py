"""What losses ask about the values of a batch, answered for fake tensors from what batches are made to be."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class ForDetection(TorchFunctionMode):
    """Let the losses of detection run on fake tensors.

    They check that boxes do not end before they begin, and match boxes with predictions by their costs. Our boxes are
    in order, and whichever are matched, as many are: no byte depends on the answers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, or answer it where it would read values that are not there."""
        if args and isinstance(args[0], FakeTensor):
            if func is Tensor.__bool__ and args[0].dtype == torch.bool:
                return True
            if func is Tensor.__array__:
                return numpy.zeros(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


class ForCtc(TorchFunctionMode):
    """Let the losses of CTC run on fake tensors: all frames count, and no label is padding or out of range."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, or answer it where it would read values that are not there."""
        if args and isinstance(args[0], FakeTensor):
            if func is Tensor.__bool__ and args[0].dtype == torch.bool:
                return False
            if func in (Tensor.masked_select, torch.masked_select):
                return args[0].flatten().clone()
            if func is F.ctc_loss:
                return _ctc_loss(*args[:2], reduction=(kwargs or {}).get("reduction", "mean"))
        return func(*args, **(kwargs or {}))


def _ctc_loss(log_probs: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
    """Return a loss that keeps what ``F.ctc_loss`` does; without values that one can say nothing of its own size.

    Args:
        log_probs: ``(frames, batch, classes)``.
        targets: ``(batch * length,)``, all of one length.
        reduction: As in ``F.ctc_loss``.
    """
    losses: Tensor = _Ctc.apply(log_probs, targets)
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


class _Ctc(torch.autograd.Function):
    """The tensors of ``aten::_ctc_loss``, uncomputed: forward and backward variables of 2 length + 1 states a frame."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, targets: Tensor) -> Tensor:
        frames, batch, _ = log_probs.shape
        losses = log_probs.new_empty(batch)
        alpha = log_probs.new_empty(batch, frames, 2 * (len(targets) // batch) + 1)
        ctx.save_for_backward(log_probs, targets, losses, alpha)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_probs, _, _, alpha = ctx.saved_tensors
        torch.empty_like(alpha)
        return torch.empty_like(log_probs), None
