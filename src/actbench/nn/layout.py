"""How a tensor lies in memory, so that codes of it are written and read in that order without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

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
    """Mark codes of a permuted tensor by one more dimension.

    Checkpointing compares the shapes of what it recomputes, and so refuses codes of a copy that lies in another order.
    """
    return codes if order is None else codes[None]


@dataclass(frozen=True)
class Layout:
    """All that is known of a tensor beside its elements.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        order: Its dimensions in the order in which they lie in memory, widest stride first; None for contiguous.
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
        """Return elements in the order of memory as a tensor of this shape and order, as a view."""
        if self.order is None:
            return flat.view(self.shape)
        return as_it_lay(flat.view([self.shape[dim] for dim in self.order]), list(self.order))


def flat_of(x: Tensor) -> Tensor:
    """Return the elements of a tensor in the order of its memory, without its graph; a view where they lie so."""
    return in_order(x.detach(), memory_order(x)).view(-1)


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
