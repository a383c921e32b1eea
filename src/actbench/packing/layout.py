"""The memory layout of a tensor, so that its codes are written and read in memory order without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def memory_order(x: Tensor) -> list[int] | None:
    """Return the dimensions in memory order, widest stride first; None for contiguous."""
    return None if x.is_contiguous() else sorted(range(x.dim()), key=x.stride, reverse=True)


def in_order(x: Tensor, order: list[int] | None) -> Tensor:
    """Return x with its dimensions in this order, contiguous; without a copy if that is its memory order."""
    return (x if order is None else x.permute(order)).contiguous()


def as_it_lay(x: Tensor, order: list[int] | None) -> Tensor:
    """Undo :func:`in_order`, as a view."""
    return x if order is None else x.permute(sorted(range(x.dim()), key=order.__getitem__))


def told_apart(codes: Tensor, order: list[int] | None) -> Tensor:
    """Mark codes of a permuted tensor by one more dimension.

    Checkpointing compares the shapes of recomputed tensors, so it refuses codes of a copy with another memory order.
    """
    return codes if order is None else codes[None]


@dataclass(frozen=True)
class Layout:
    """A tensor's shape, type and memory order.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        order: Its dimensions in memory order, widest stride first; None for contiguous.
    """

    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...] | None = None

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Return the layout of a tensor."""
        order = memory_order(x)
        return cls(x.shape, x.dtype, None if order is None else tuple(order))

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        return self.shape.numel()

    @property
    def has_rows(self) -> bool:
        """Whether each entry of dimension 0 is one piece of the tensor's memory."""
        return len(self.shape) > 0 and (self.order is None or self.order[0] == 0)

    def rows(self, first: int, last: int) -> Layout:
        """Return the layout of rows ``first`` to ``last - 1``."""
        return replace(self, shape=torch.Size((last - first, *self.shape[1:])))

    def laid_out(self, flat: Tensor) -> Tensor:
        """Return elements in memory order as a view with this shape and order."""
        if self.order is None:
            return flat.view(self.shape)
        return as_it_lay(flat.view([self.shape[dim] for dim in self.order]), list(self.order))


def flat_of(x: Tensor, layout: Layout | None = None) -> Tensor:
    """Return the elements of a tensor in memory order, detached; a view if they have no gaps in memory.

    The layout is that of the tensor, where it is known.
    """
    order = memory_order(x) if layout is None else layout.order
    return x.detach().view(-1) if order is None else in_order(x.detach(), list(order)).view(-1)


def without_repeats(tensor: Tensor) -> Tensor:
    """Return each element of a tensor once: dimensions of stride 0 get size 1."""
    if 0 not in tensor.stride():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def constants(values: Sequence[Any], like: Tensor) -> Tensor:
    """Return float32 values on the device of ``like``; fake if ``like`` is."""
    if isinstance(like, FakeTensor):
        with like.fake_mode:
            return torch.tensor(values, dtype=torch.float32, device=like.device)
    return torch.tensor(values, dtype=torch.float32, device=like.device)
