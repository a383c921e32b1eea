"""Softmax and log-softmax as torch before 1.11 ran them: autograd saved the input beside the output.

The backward pass needed no more of the input than its dtype (pytorch issue 64000, pull request 65242).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Fused = Callable[[Tensor, int, bool], Tensor]
"""From an input, a dimension, and whether to write float32 from a half type, to the output of one kernel."""


class _BothSaved(torch.autograd.Function):
    """Run a fused kernel, and save its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any, dim: int, widen: bool) -> Tensor:
        y: Tensor = forward(x, dim, widen)
        ctx.save_for_backward(x, y)
        ctx.backward, ctx.dim = backward, dim
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        return ctx.backward(grads[0], y, ctx.dim, x.dtype), None, None, None, None


def softmax(x: Tensor, dim: int, widen: bool) -> Tensor:
    """Return the softmax of ``x`` along ``dim``, as float32 with ``widen``; both are saved for backward."""
    return _both_saved(x, torch.ops.aten._softmax, torch.ops.aten._softmax_backward_data, dim, widen)


def log_softmax(x: Tensor, dim: int, widen: bool) -> Tensor:
    """Return the logarithm of :func:`softmax`; input and output are saved for backward."""
    return _both_saved(x, torch.ops.aten._log_softmax, torch.ops.aten._log_softmax_backward_data, dim, widen)


def _both_saved(x: Tensor, forward: Any, backward: Any, dim: int, widen: bool) -> Tensor:
    y: Tensor = _BothSaved.apply(x, forward.default, backward.default, dim, widen)
    return y
