"""Quantiles on a CPU: torch 2.15 selects a few ranks of real tensors, where it sorts tensors of other classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actbench.simulator.branches import Branch
from actbench.simulator.profiles import INSTALLED_TORCH

_MOST_RANKS = 100
_BETWEEN = ("linear", "midpoint")
"""Interpolations between two ranks; the others round to one."""

_ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "lower": Tensor.floor_,
    "higher": Tensor.ceil_,
    "nearest": Tensor.round_,
}


def branches() -> dict[str, Branch]:
    """Return what replaces quantiles on a CPU, by the names of operators."""
    if INSTALLED_TORCH < (2, 15):  # 2.11 sorts
        return {}
    return {
        f"{name}{overload}": Branch.of(f"{name}{overload}", _selecting(name == "nanquantile"), _selects)
        for name in ("quantile", "nanquantile")
        for overload in ("", ".scalar")
    }


def _selects(
    x: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> bool:
    """Return whether torch selects: arguments are right, and the ranks are few beside the numbers of a row."""
    asked = q.numel() if isinstance(q, Tensor) else 1
    is_right = (q.dim() < 2 and q.dtype == x.dtype) if isinstance(q, Tensor) else 0 <= q <= 1
    if not is_right or not x.numel() or x.dtype not in (torch.float32, torch.float64):
        return False
    if dim is not None and not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        return False
    row = x.numel() if dim is None or not x.dim() else x.shape[dim]
    return asked * (2 if interpolation in _BETWEEN else 1) <= min(_MOST_RANKS, math.isqrt(row))


def _selecting(ignores_nan: bool) -> Callable[..., Tensor]:
    def quantile(
        x: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> Tensor:
        asked = q if isinstance(q, Tensor) else torch.scalar_tensor(q, dtype=x.dtype)
        rows = _rows(x, dim, keepdim)
        ranks = _ranks(rows, asked.double(), ignores_nan)
        if interpolation in _ROUNDED:
            _ROUNDED[interpolation](ranks)
        places = ranks.long()
        count = places.shape[-1]
        if interpolation in _BETWEEN:
            weights = (torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - places).to(x.dtype)
            places = torch.cat([places, ranks.ceil_().long()], -1)
        # a second tensor of places, as torch's selection makes it: only its bytes count here
        rows, places = rows.contiguous(), torch.empty_like(places)
        found = rows.gather(-1, places.narrow(-1, 0, count))
        if interpolation in _BETWEEN:
            found.lerp_(rows.gather(-1, places.narrow(-1, count, count)), weights)
        return found.squeeze_(-1) if not asked.dim() else found.unsqueeze_(0).transpose_(0, -1).squeeze_(-1)

    return quantile


def _rows(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """Return the numbers of each quantile as the last dimension; a reduced one before them is kept if asked for."""
    if dim is None or not x.dim():
        return x.reshape(*([1] * x.dim() if keepdim else []), -1)
    dim %= x.dim()
    rows = x.unsqueeze(-1).transpose(dim, -1)
    return rows if keepdim else rows.squeeze(dim)


def _ranks(rows: Tensor, asked: Tensor, ignores_nan: bool) -> Tensor:
    """Return the ranks of quantiles in the numbers of each row; where one is NaN, the last unless it is ignored."""
    if ignores_nan:
        ranks = asked * (rows.isnan().logical_not_().sum(-1, True) - 1)
        return ranks.masked_fill_(ranks < 0, 0)
    last = rows.shape[-1] - 1
    ranks, is_nan = torch.broadcast_tensors(asked * last, rows.isnan().any(-1, True))  # type: ignore[no-untyped-call]
    found: Tensor = ranks.masked_fill(is_nan, last)
    return found
