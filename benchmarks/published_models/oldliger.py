"""A head of words with the loss of Liger 0.3 (November 2024), in the buffers that it allocated; only simulated.

It made logits and their gradient for one piece of the rows after the other, in the forward pass. Each piece was made in
the type of the weights, cast to float32 for the kernel, and cast back, while the gradient of the piece before lived on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from others import WIDTH, WORDS, Head, head
from torch import Tensor, nn

from actbench.ops.simulation import one_kernel


class Loss(torch.autograd.Function):
    """The loss of a linear layer; its forward pass computes the gradients of hidden states and weight."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss."""
        rows = len(hidden)
        piece = min(rows, 1 << (-(-rows // -(-WORDS // WIDTH)) - 1).bit_length())
        to_hidden, to_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        losses = hidden.new_zeros(rows, dtype=torch.float32)
        for first in range(0, rows, piece):
            some = slice(first, first + piece)
            logits = hidden[some] @ weight.t()
            logits = logits.float()
            one_kernel([logits, losses], [labels])  # writes the gradient over the logits
            logits = logits.to(hidden.dtype)
            gradient = logits * 1.0  # the share of labels that count; it lives on through the next piece
            torch.mm(gradient, weight, out=to_hidden[some])
            to_weight.addmm_(logits.t(), hidden[some])
        ctx.save_for_backward(to_hidden, to_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, scaled in place."""
        to_hidden, to_weight = ctx.saved_tensors
        return to_hidden.mul_(gradient.to(to_hidden.dtype)), to_weight.mul_(gradient.to(to_weight.dtype)), None


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of the first sample."""
    assert isinstance(module, Head)
    total: Tensor = Loss.apply(module.hidden, module.lin.weight, batch["labels"][0])
    return total


def build(tokens: int) -> Any:
    """Return a head with so many tokens in each micro-batch of one row, its loss and SGD."""
    module, batches, _, optimizer = head(tokens)
    return module, batches, loss, optimizer


head_8192 = partial(build, 8192)
head_32768 = partial(build, 32768)
