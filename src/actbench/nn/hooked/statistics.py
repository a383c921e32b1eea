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

Test = Callable[[Tensor], bool]

_is_of_operator: ContextVar[Test | None] = ContextVar("_is_of_operator", default=None)
"""Says of what the operator that runs saves whether it is a statistic."""


def statistic(tensor: Tensor) -> str | None:
    """Return that a tensor which is being saved is a statistic, as a reason to leave it whole, or None."""
    is_of_operator = _is_of_operator.get()
    one_each_row = tensor.dim() > 1 and tensor.shape[-1] == 1 and not tensor.requires_grad
    if one_each_row or (is_of_operator is not None and is_of_operator(tensor)):
        return "a statistic, or goes with one"
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
    tests = dict.fromkeys(norms, _of_norm) | {F.multi_head_attention_forward: _of_attention}
    return {function: functools.partial(_under, test, function) for function, test in tests.items()}


def _of_norm(x: Tensor) -> Test:
    """Return what is true of all that a norm saves but its input: group norm's statistics have a graph."""
    elements = x.numel()
    return lambda tensor: tensor.numel() < elements


def _of_attention(_: Tensor) -> Test:
    """Return what is true of all that fused attention saves inside of torch's own attention, where no rule sees it.

    Packed, its inputs would not go with its statistics (:mod:`actbench.nn.hooked.attention`).
    """
    return lambda tensor: tensor.dim() >= 4 or not tensor.requires_grad


def _under(test_for: Callable[[Tensor], Test], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first: Any = args[0] if args else kwargs.get("input", kwargs.get("query"))
    token = _is_of_operator.set(test_for(first))
    try:
        return function(*args, **kwargs)
    finally:
        _is_of_operator.reset(token)
