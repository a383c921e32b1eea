"""Cross entropy of a linear layer's output as Liger's kernels compute it (Hsu et al., arXiv 2410.10989, section 3.2).

On a CUDA device the kernels run, from an optional package. Elsewhere, torch computes the same numbers in the same
buffers: a CPU runs it, and a simulation counts its bytes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from actbench.errors import ConversionError, MeasurementError
from actbench.methods.loss.crossentropy import How, Loss, gradient_of, less_target
from actbench.methods.loss.deferred import DeferredTensor
from actbench.methods.loss.deferredlogits import Cast
from actbench.ops.simulation import few_for_all, one_kernel, runs_triton
from actbench.packing.precision import no_autocast, wide
from actbench.packing.refusals import first_order

_HALVES = torch.float16, torch.bfloat16
_BLOCK = 1 << 15
"""Elements of the logits whose loss torch computes at once: a kernel computes each row alone, without temporaries."""


@functools.cache
def kernels() -> Any:
    """Return Liger's class of the loss; raise a MeasurementError if Liger is not installed."""
    try:
        return importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise MeasurementError(
            f'chunked_loss:liger needs liger-kernel on CUDA: pip install "actbench[liger]" ({error})'
        ) from None


class LigerCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropy of deferred logits; forward computes the gradients of the layer too."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredTensor, target: Tensor, how: How) -> Tensor:
        """Return the sum, float32; raise a ConversionError if logits are changed between the layer and the loss."""
        deferred: Any = logits.deferred
        if not all(isinstance(step, Cast) for step in deferred.scaling):
            raise ConversionError(
                "chunked_loss:liger: the model scales or caps its logits, which Liger's kernels do not do here; "
                "take chunked_loss without liger"
            )
        source = deferred.source
        given = deferred.rows(), source.weight, source.bias
        trained = (source.hidden, *given[1:])
        needs = [logits.requires_grad and each is not None and each.requires_grad for each in trained]
        with no_autocast(target):
            x, w, b = (None if each is None else each.detach().to(source.dtype) for each in given)
            fused: Any = _by_kernels if runs_triton(target) else _by_torch
            total: Tensor
            total, found = fused(x, w, b, target, how, needs)
        ctx.save_for_backward(target, *found)
        ctx.deferred, ctx.how = deferred, how
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, which is not computed yet."""
        target, *found = ctx.saved_tensors
        # nothing public tells whether backward() was called with retain_graph=True
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        loss = _LigerLoss(ctx.deferred, target, ctx.how, gradient, found, again)
        return DeferredTensor.of(gradient_of(ctx, loss)), None, None


Found = tuple[Tensor, list[Tensor | None]]
"""A sum of losses, and the gradients of x, weight and bias where they are needed."""


def _by_kernels(x: Any, w: Any, b: Tensor | None, target: Tensor, how: How, needs: Sequence[bool]) -> Found:
    loss = kernels()(ignore_index=how.ignore_index, label_smoothing=how.smoothing, reduction="sum")
    asked = (any(needs), *needs[1:])  # without the gradient of the input Liger computes none
    with torch.enable_grad():
        x, w, b = (
            each if each is None else each.requires_grad_(ask) for each, ask in zip((x, w, b), asked, strict=True)
        )
        total: Tensor = loss(w, x, target, b)
        wanted = [leaf for leaf, need in zip((x, w, b), needs, strict=True) if need and leaf is not None]
        found = iter(torch.autograd.grad(total, wanted) if wanted else ())
    return total.detach(), [next(found) if need else None for need in needs]


def piece_rows(rows: int, width: int, classes: int) -> int:
    """Return the rows of one piece by Liger's rule: its logits have about as many elements as the input of the head."""
    # fused_linear_cross_entropy_forward of liger_kernel: pieces of the next power of two of rows
    pieces = -(-classes // width)
    least = -(-rows // pieces)
    return min(rows, 1 << max(0, least - 1).bit_length())


def _by_torch(x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, how: How, needs: Sequence[bool]) -> Found:
    """Return what the kernels return, computed in the buffers that Liger allocates on a card of Ampere or later."""
    size = piece_rows(len(x), x.shape[1], len(w))
    to_x = torch.zeros_like(x)
    to_w = torch.zeros_like(w) if needs[1] else None
    to_b = torch.zeros_like(b) if b is not None and needs[2] else None
    losses = x.new_zeros(len(x), dtype=wide(x.dtype))
    held = x.new_empty(size, len(w))  # logits, and then their gradient, of one piece after the other
    for first in few_for_all(range(0, len(x), size), of=x):
        rows = slice(first, first + size)
        logits = held[: len(x[rows])]
        torch.mm(x[rows], w.T, out=logits)
        if b is not None:
            logits.add_(b)
        _to_gradient(logits, target[rows], losses[rows], how)
        if any(needs):
            torch.mm(logits, w, out=to_x[rows])
        if to_w is not None and to_w.dtype in _HALVES:
            to_w.addmm_(logits.T, x[rows])
        elif to_w is not None:
            to_w += logits.T @ x[rows]  # so does Liger for float32: as large as the weight
        if to_b is not None:
            to_b += logits.sum(0)
    return losses.sum(), [to_x if needs[0] else None, to_w, to_b]


def _to_gradient(logits: Tensor, target: Tensor, losses: Tensor, how: How) -> None:
    """Write the loss of each row, and the gradient of the logits in their place."""
    if isinstance(logits, FakeTensor):
        one_kernel([logits, losses], [target])
        return
    one = losses.new_ones(())
    size = max(1, _BLOCK // logits.shape[1])
    for first in range(0, len(logits), size):
        rows = slice(first, first + size)
        some = logits[rows].to(losses.dtype)
        losses[rows] = F.cross_entropy(
            some, target[rows], ignore_index=how.ignore_index, reduction="none", label_smoothing=how.smoothing
        )
        logits[rows] = less_target(some, target[rows], how, one).to(logits.dtype)


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
        # the gradients were made for this pass alone, unless the graph is kept
        scale = torch.mul if self.again else Tensor.mul_
        rows, *others = (None if each is None else scale(each, self.gradient.to(each.dtype)) for each in self.found)
        return self.unshaped(rows), *others
