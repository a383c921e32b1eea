"""Cross entropy of a linear layer's output, a piece of the rows at a time, in forward and again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from actbench.nn.precision import cast, no_autocast, wide
from actbench.nn.refusals import first_order

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cast:
    """A step that casts a tensor."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tensor in that type."""
        return x.to(self.dtype)


@dataclass(frozen=True)
class How:
    """How cross entropy is computed.

    Attributes:
        pieces: How many pieces the rows are cut into.
        dtype: The type that the layer computes in.
        scaling: Steps on each logit after the layer.
        ignore_index: Class of the rows that do not count.
        smoothing: As ``label_smoothing`` of ``F.cross_entropy``.
    """

    pieces: int
    dtype: torch.dtype
    scaling: tuple[Step, ...]
    ignore_index: int
    smoothing: float


def done(x: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Apply steps to a tensor, one after the other."""
    for step in steps:
        x = step(x)
    return x


def unpacked() -> saved_tensors_hooks:
    """Shield saved tensors inside the context from hooks that pack.

    Else backward would compute the softmax from noisy tensors, which biases all gradients.
    """
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class CrossEntropy(torch.autograd.Function):
    """Sum of the cross entropy of the rows of a linear layer's output, at least in float32, a piece at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: How) -> Tensor:
        """Return the sum."""
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.versions = (hidden._version, weight._version)
        ctx.how = how
        total = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device)
        with no_autocast(hidden):
            matrix, offset = weight.to(how.dtype), cast(bias, how.dtype)
            for x, y in _pieces(hidden, target, how.pieces):
                total += _loss(F.linear(x.to(how.dtype), matrix, offset), y, how)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias; the logits of a piece are computed again."""
        needs, how = ctx.needs_input_grad, ctx.how
        hidden, weight, bias, target = ctx.saved_tensors
        if (hidden._version, weight._version) != ctx.versions:
            raise RuntimeError("what chunked_loss needs for its backward pass was changed by an inplace operation")
        to_hidden = torch.empty_like(hidden) if needs[0] else None
        to_weight = torch.zeros_like(weight) if needs[1] else None
        to_bias = torch.zeros_like(bias) if needs[2] else None
        first = 0
        with no_autocast(hidden):
            matrix, offset = weight.to(how.dtype), cast(bias, how.dtype)
            for x, y in _pieces(hidden, target, how.pieces):
                x = x.to(how.dtype)
                found = _slopes(F.linear(x, matrix, offset), y, how, gradient)
                if to_hidden is not None:
                    to_hidden[first : first + len(x)] = found @ matrix
                if to_weight is not None:
                    _add_product(to_weight, found, x)
                if to_bias is not None:
                    to_bias += found.sum(0)
                del found  # else it exists beside the logits of the next piece
                first += len(x)
        return to_hidden, to_weight, to_bias, None, None


def _pieces(hidden: Tensor, target: Tensor, pieces: int) -> Iterator[tuple[Tensor, Tensor]]:
    rows = -(-len(hidden) // pieces) or 1
    return zip(torch.split(hidden, rows), torch.split(target, rows), strict=True)


def _loss(logits: Tensor, target: Tensor, how: How) -> Tensor:
    finished = done(logits, how.scaling)
    finished = finished.to(wide(finished.dtype))
    return F.cross_entropy(
        finished, target, ignore_index=how.ignore_index, reduction="sum", label_smoothing=how.smoothing
    )


def _slopes(logits: Tensor, target: Tensor, how: How, gradient: Tensor) -> Tensor:
    """Return the gradient of the logits, (rows, classes): ``gradient`` is that of the sum of their cross entropy.

    It is the softmax minus the target, so that the softmax is the only copy of the logits.
    """
    if all(isinstance(step, Cast) for step in how.scaling):
        return _less_target(done(logits, how.scaling), target, how, gradient).to(logits.dtype)
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        finished = done(logits, how.scaling)
    slopes = _less_target(finished.detach(), target, how, gradient).to(finished.dtype)
    (found,) = torch.autograd.grad(finished, logits, slopes)
    return found


def _less_target(finished: Tensor, target: Tensor, how: How, gradient: Tensor) -> Tensor:
    """Return softmax minus target, times the gradient of the sum, and 0 for rows that do not count."""
    slopes = torch.softmax(finished.to(wide(finished.dtype)), -1)
    ignored = (target == how.ignore_index)[:, None]
    predicted = target[:, None].masked_fill(ignored, 0)
    slopes.scatter_add_(1, predicted, slopes.new_full((), how.smoothing - 1).expand_as(predicted))
    if how.smoothing:
        slopes.sub_(how.smoothing / slopes.shape[1])
    return slopes.masked_fill_(ignored, 0).mul_(gradient)


def _add_product(total: Tensor, found: Tensor, x: Tensor) -> None:
    """Add ``found.T @ x`` to a gradient."""
    if total.dtype == found.dtype:
        total.addmm_(found.T, x)
    else:
        total += found.T @ x
