"""What operators save of statistics, which stays whole: it is small, and an error in it is one in every element.

Norms save a mean and a scale for each row or channel, fused attention the logarithm of a sum for each query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_limits: ContextVar[tuple[int, int]] = ContextVar("_limits", default=(0, 0))
"""Results of fewer dimensions and fewer elements that an operator saves of its own are statistics."""

_ANY = 1 << 10  # more dimensions than a tensor has


def statistic(tensor: Tensor) -> str | None:
    """Return that a tensor which is being saved is a statistic, as a reason to leave it whole, or None."""
    if tensor.requires_grad or tensor.grad_fn is not None:
        return None
    dims, elements = _limits.get()
    if (tensor.dim() < dims and tensor.numel() < elements) or (tensor.dim() > 1 and tensor.shape[-1] == 1):
        return "a statistic"
    return None


def keeping_statistics() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return rules, as for :class:`~actbench.nn.intercepted.Intercepted`, under which statistics are known as such."""
    norms: tuple[Callable[..., Any], ...] = (
        F.layer_norm,
        F.group_norm,
        F.instance_norm,
        F.batch_norm,
        F.rms_norm,
        torch.layer_norm,
        torch.batch_norm,
    )
    dims = dict.fromkeys(norms, _ANY) | {F.scaled_dot_product_attention: 4}
    return {function: functools.partial(_under, most, function) for function, most in dims.items()}


def _under(dims: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = args[0] if args else kwargs.get("input", kwargs.get("query"))
    token = _limits.set((dims, given.numel()))
    try:
        return function(*args, **kwargs)
    finally:
        _limits.reset(token)
