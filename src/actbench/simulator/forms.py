"""What operators of a CUDA device return, where torch's fake tensors have no form of them, or a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import ScriptObject, Tensor
from torch._C._distributed_c10d import FakeWork

from actbench.simulator import ctc

aten = torch.ops.aten
_OF_SEVERAL = (
    *("allreduce_coalesced_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter_tensor_coalesced_",
)
"""Collectives of several tensors, of which torch's fake tensors have no form."""


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Torch's form decomposes it, and takes no bfloat16 to be returned in float32."""
    return x.new_empty(x.shape, dtype=torch.float32 if half_to_float else x.dtype)


def _statistics(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the mean and the inverse of the standard deviation of each channel, in float32 for half types."""
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def _gathered(x: Tensor, mean: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the two of all processes, from theirs, (processes, channels)."""
    return mean.new_empty(mean.shape[1]), mean.new_empty(mean.shape[1])


def _reduced(
    gradient: Tensor, x: Tensor, mean: Tensor, _: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor | None, ...]:
    """Return sums over a channel's gradients, and over their products with its elements; gradients of parameters."""
    of_input, of_weight, of_bias = wanted
    sums = [torch.empty_like(mean) if of_input else None for _ in range(2)]
    parameters = [None if weight is None or not wants else torch.empty_like(weight) for wants in (of_weight, of_bias)]
    return (*sums, *parameters)


def _like_input(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _work(*_: Any, **__: Any) -> ScriptObject:
    """Return the work of a collective that is done."""
    return FakeWork().boxed()


FORMS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(ctc.LOSSES, ctc.lost),
    aten._log_softmax.default: _log_softmax,
    # of nn.SyncBatchNorm, in several processes
    aten.batch_norm_stats.default: _statistics,
    aten.batch_norm_gather_stats_with_counts.default: _gathered,
    aten.batch_norm_elemt.default: _like_input,
    aten.batch_norm_backward_reduce.default: _reduced,
    aten.batch_norm_backward_elemt.default: lambda gradient, x, *_: torch.empty_like(x),
    **{getattr(torch.ops.c10d, name).default: _work for name in _OF_SEVERAL},
}
"""By operator, what makes its results from its arguments, inside a fake tensor mode."""
