"""Cross entropy of a linear layer's output, a piece of the rows at a time, in forward and again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from actbench.methods.loss.deferred import Deferred, DeferredTensor
from actbench.methods.loss.deferredlogits import Cast, DeferredLogits, done
from actbench.packing.precision import cast, no_autocast, wide
from actbench.packing.refusals import first_order

aten = torch.ops.aten


@dataclass(frozen=True)
class How:
    """How cross entropy is computed.

    Attributes:
        pieces: How many pieces the rows are cut into.
        ignore_index: Class of the rows that do not count.
        smoothing: As ``label_smoothing`` of ``F.cross_entropy``.
    """

    pieces: int
    ignore_index: int
    smoothing: float


def unpacked() -> saved_tensors_hooks:
    """Shield saved tensors inside the context from hooks that pack.

    Else backward would compute the softmax from noisy tensors, which biases all gradients.
    """
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@dataclass(frozen=True, eq=False)
class Loss:
    """The sum of the cross entropy of logits, (rows, classes), in the backward pass.

    Attributes:
        logits: How to compute the logits.
        target: The classes, (rows,).
        how: How the loss was computed.
        gradient: The gradient of the loss, a scalar.
    """

    logits: DeferredLogits
    target: Tensor
    how: How
    gradient: Tensor

    def slopes(self) -> Tensor:
        """Return the gradient of the logits, beneath autograd."""
        self.logits.source.check(Slopes.what)
        return less_target(self.logits.values(), self.target, self.how, self.gradient).to(self.logits.dtype)

    def to_source(self, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias of the layer, where they are needed, a piece at a time."""
        source, how = self.logits.source, self.how
        source.check(Slopes.what)
        rows = self.logits.rows()
        to_rows = torch.empty_like(rows) if needs[0] else None
        to_weight = torch.zeros_like(source.weight) if needs[1] else None
        to_bias = torch.zeros_like(source.bias) if needs[2] and source.bias is not None else None
        first = 0
        matrix, offset = source.weight.to(source.dtype), cast(source.bias, source.dtype)
        for index, (x, y) in enumerate(pieces_of(rows, self.target, how.pieces)):
            x = x.to(source.dtype)
            found = _slopes(self.piece(index, x, matrix, offset), y, self)
            if to_rows is not None:
                to_rows[first : first + len(x)] = found @ matrix
            if to_weight is not None and to_weight.dtype == found.dtype:
                # without a temporary as large as the weight
                to_weight.addmm_(found.T, x)
            elif to_weight is not None:
                to_weight += found.T @ x
            if to_bias is not None:
                to_bias += found.sum(0)
            del found  # else it exists beside the logits of the next piece
            first += len(x)
        return self.unshaped(to_rows), to_weight, to_bias

    def piece(self, index: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return what the layer returns of the rows of a piece, (rows, classes)."""
        return F.linear(x, weight, bias)

    def unshaped(self, to_rows: Tensor | None) -> Tensor | None:
        """Return the gradient of the input of the layer from that of its reshaped rows."""
        hidden, shaping = self.logits.source.hidden, self.logits.shaping
        if to_rows is None or to_rows.shape == hidden.shape:
            return to_rows
        with torch.enable_grad():
            given = hidden.detach().requires_grad_()
            (found,) = torch.autograd.grad(done(given, shaping), given, to_rows)
        return found


@dataclass(frozen=True, eq=False)
class Slopes(Deferred):
    """How to compute the gradient of logits, (..., classes), by some losses.

    The backward pass carries it from each loss to the layer, past all hooks on gradients of logits. Code that reads the
    gradient gets its values. The layer computes its own gradients in pieces, without that of the logits.

    Attributes:
        logits: How to compute the logits.
        losses: The losses, each with the operators on the way from the gradient of its own logits to this one.
    """

    what: ClassVar[str] = "the gradients of the logits"

    logits: DeferredLogits
    losses: tuple[tuple[Loss, tuple[Callable[[Tensor], Tensor], ...]], ...]

    @classmethod
    def of(cls, logits: DeferredLogits, losses: Any) -> Slopes:
        """Return how to compute the gradient of these logits."""
        return cls(logits.shape, logits.dtype, logits.device, logits, losses)

    def values(self) -> Tensor:
        """Return the gradient."""
        first, *others = (done(loss.slopes(), operators) for loss, operators in self.losses)
        return sum(others, first)

    def after(self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Slopes | None:
        """Return the gradient after an operator of the backward pass; None for an operator that needs the values."""
        if func in (aten.detach.default, aten.alias.default):
            return self
        if func is aten.add.Tensor:  # several losses of the same logits
            other = getattr(others[0], "deferred", None)
            if kwargs or not isinstance(other, Slopes) or other.logits is not self.logits:
                return None
            return replace(self, losses=(*self.losses, *other.losses))
        step = self.logits.step
        if step is None or not step.is_undone_by(func, others, kwargs, self.logits):
            return None
        operator = partial(_called, func, others, kwargs)
        return Slopes.of(self.logits.before, tuple((loss, (*before, operator)) for loss, before in self.losses))

    def to_source(self, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias of the layer, where they are needed."""
        found = [loss.to_source(needs) for loss, _ in self.losses]
        return tuple(None if each[0] is None else sum(each[1:], each[0]) for each in zip(*found, strict=True))


def _called(func: Any, others: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Tensor:
    result: Tensor = func(x, *others, **kwargs)
    return result


class CrossEntropy(torch.autograd.Function):
    """Sum of the cross entropy of deferred logits, at least in float32, a piece at a time."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredTensor, target: Tensor, how: How) -> Tensor:
        """Return the sum."""
        deferred: Any = logits.deferred
        ctx.save_for_backward(target)
        ctx.deferred, ctx.how = deferred, how
        source, hidden = deferred.source, deferred.rows()
        total = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device)
        with no_autocast(hidden):
            matrix, offset = source.weight.to(source.dtype), cast(source.bias, source.dtype)
            for x, y in pieces_of(hidden, target, how.pieces):
                total += loss_of(F.linear(x.to(source.dtype), matrix, offset), y, deferred, how)
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, which is not computed yet."""
        (target,) = ctx.saved_tensors
        return DeferredTensor.of(gradient_of(ctx, Loss(ctx.deferred, target, ctx.how, gradient))), None, None


def gradient_of(ctx: Any, loss: Loss) -> Slopes:
    """Return the gradient of the logits of a loss; free what its function held, as autograd frees saved tensors."""
    # nothing public tells whether backward() was called with retain_graph=True
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.deferred = None
    return Slopes.of(loss.logits, ((loss, ()),))


def pieces_of(hidden: Tensor, target: Tensor, pieces: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows and the classes of each piece."""
    rows = -(-len(hidden) // pieces) or 1
    return zip(torch.split(hidden, rows), torch.split(target, rows), strict=True)


def loss_of(logits: Tensor, target: Tensor, deferred: DeferredLogits, how: How) -> Tensor:
    """Return the sum of the cross entropy of a piece, at least in float32."""
    finished = done(logits, deferred.scaling)
    finished = finished.to(wide(finished.dtype))
    return F.cross_entropy(
        finished, target, ignore_index=how.ignore_index, reduction="sum", label_smoothing=how.smoothing
    )


def _slopes(logits: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """Return the gradient of some rows of what the layer returns, (rows, classes).

    It is the softmax minus the target, so that the softmax is the only copy of the logits.
    """
    scaling, how, gradient = loss.logits.scaling, loss.how, loss.gradient
    if all(isinstance(step, Cast) for step in scaling):
        return less_target(done(logits, scaling), target, how, gradient).to(logits.dtype)
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        finished = done(logits, scaling)
    slopes = less_target(finished.detach(), target, how, gradient).to(finished.dtype)
    (found,) = torch.autograd.grad(finished, logits, slopes)
    return found


def less_target(finished: Tensor, target: Tensor, how: How, gradient: Tensor) -> Tensor:
    """Return softmax minus target, times the gradient of the sum, and 0 for rows that do not count."""
    slopes = torch.softmax(finished.to(wide(finished.dtype)), -1)
    ignored = (target == how.ignore_index)[:, None]
    # an ignored class, such as -100, is no index that scatter_add_ takes
    predicted = target[:, None].masked_fill(ignored, 0)
    # the target has 1 - smoothing, and then every class smoothing / classes
    slopes.scatter_add_(1, predicted, slopes.new_full((), how.smoothing - 1).expand_as(predicted))
    if how.smoothing:
        slopes.sub_(how.smoothing / slopes.shape[1])
    return slopes.masked_fill_(ignored, 0).mul_(gradient)
