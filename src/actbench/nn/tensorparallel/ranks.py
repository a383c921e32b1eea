"""The processes that share layers, and what crosses between them, forward and backward.

A group is known by its name, so that a model with hooks that know it can be copied and pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_ops: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class Ranks:
    """Processes that share layers.

    Attributes:
        size: How many.
        rank: Which of them this is.
        group: Name of their process group.
    """

    size: int
    rank: int
    group: str

    @classmethod
    def of(cls, mesh: DeviceMesh, axis: str) -> Self:
        """Return those of a mesh along one of its axes."""
        group = mesh.get_group(axis)
        return cls(group.size(), group.rank(), group.group_name)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of what all processes give, a tensor of its own."""
        result: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", self.group))
        return result

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's part of a tensor that all have, a view."""
        width = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * width, width)

    def joined(self, x: Tensor, dim: int) -> Tensor:
        """Return the parts of all processes, one after the other along a dimension."""
        joined: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), self.size, self.group))
        return joined if dim == 0 else torch.cat(joined.chunk(self.size), dim)

    def part_of_sum(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's part of the sum of what all processes give."""
        if dim:
            x = torch.cat(x.chunk(self.size, dim))
        part: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.group))
        return part


class _Crossing(torch.autograd.Function):
    """Something that crosses between processes, whose gradient crosses by another."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how = inputs[1:]


class _Shared(_Crossing):
    @staticmethod
    def forward(x: Tensor, ranks: Ranks) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, *ctx.how), None


class _Summed(_Crossing):
    @staticmethod
    def forward(x: Tensor, ranks: Ranks) -> Tensor:
        return ranks.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return shared(gradient, *ctx.how), None


class _Part(_Crossing):
    @staticmethod
    def forward(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        return ranks.part(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return joined(gradient, *ctx.how), None, None


class _Joined(_Crossing):
    @staticmethod
    def forward(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        return ranks.joined(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return part(gradient, *ctx.how), None, None


class _SharedParts(_Crossing):
    @staticmethod
    def forward(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        return ranks.joined(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return part_of_sum(gradient, *ctx.how), None, None


class _PartOfSum(_Crossing):
    @staticmethod
    def forward(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        return ranks.part_of_sum(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return shared_parts(gradient, *ctx.how), None, None


def _apply(crossing: type[_Crossing], *args: Any) -> Tensor:
    result: Tensor = crossing.apply(*args)
    return result


def shared(x: Tensor, ranks: Ranks) -> Tensor:
    """Return a tensor that all processes have, each to use a part of it in its own way: gradients are summed."""
    return _apply(_Shared, x, ranks)


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of what the processes have, which all of them use alike."""
    return _apply(_Summed, x, ranks)


def part(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return this process's part of a tensor that all have."""
    return _apply(_Part, x, ranks, dim)


def joined(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the whole of which the processes have a part each, and which all of them use alike."""
    return _apply(_Joined, x, ranks, dim)


def shared_parts(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the whole of which the processes have a part each, to use each in its own way: gradients are summed."""
    return _apply(_SharedParts, x, ranks, dim)


def part_of_sum(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return this process's part of the sum of what the processes have."""
    return _apply(_PartOfSum, x, ranks, dim)
