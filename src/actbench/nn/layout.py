"""How a tensor lies in memory, so that codes of it are written and read in that order without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def memory_order(x: Tensor) -> list[int] | None:
    """Return the dimensions in the order in which they lie in memory, widest stride first; None for contiguous."""
    return None if x.is_contiguous() else sorted(range(x.dim()), key=x.stride, reverse=True)


def in_order(x: Tensor, order: list[int] | None) -> Tensor:
    """Return x with its dimensions in this order, contiguous; no copy where they lie so in memory."""
    return (x if order is None else x.permute(order)).contiguous()


def as_it_lay(x: Tensor, order: list[int] | None) -> Tensor:
    """Undo :func:`in_order`, as a view."""
    return x if order is None else x.permute(sorted(range(x.dim()), key=order.__getitem__))


def told_apart(codes: Tensor, order: list[int] | None) -> Tensor:
    """Give codes of elements in another order another shape: who recomputes them of a copy in order is told."""
    return codes if order is None else codes[None]


def without_repeats(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor once each: a dimension of stride 0 has size 1."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def constants(values: Sequence[Any], like: Tensor) -> Tensor:
    """Return float32 values where ``like`` is, fake if it is."""
    if isinstance(like, FakeTensor):
        with like.fake_mode:
            return torch.tensor(values, dtype=torch.float32, device=like.device)
    return torch.tensor(values, dtype=torch.float32, device=like.device)
