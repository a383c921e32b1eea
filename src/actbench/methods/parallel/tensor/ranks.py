"""The processes that share layers: what crosses between them, forward and backward, and their random numbers.

A group is known by its name, so that a model with hooks that know it can be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

Crossing = Callable[[Tensor], Tensor]

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
        """Return the processes of a mesh along one of its axes."""
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
    def forward(x: Tensor, there: Crossing, back: Crossing) -> Tensor:
        return there(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _cross(x: Tensor, there: Crossing, back: Crossing) -> Tensor:
    result: Tensor = _Crossing.apply(x, there, back)
    return result


def shared(x: Tensor, ranks: Ranks) -> Tensor:
    """Return a tensor that all processes have, each to use a part of it in its own way: gradients are summed."""
    return _cross(x, lambda x: x.view_as(x), lambda gradient: summed(gradient, ranks))


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of what the processes have, which all of them use in the same way."""
    return _cross(x, ranks.sum, lambda gradient: shared(gradient, ranks))


def part(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return this process's part of a tensor that all have."""
    return _cross(x, lambda x: ranks.part(x, dim).contiguous(), lambda gradient: joined(gradient, ranks, dim))


def joined(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Gather the parts of all processes into the whole tensor, which all of them use in the same way."""
    return _cross(x, lambda x: ranks.joined(x, dim), lambda gradient: part(gradient, ranks, dim))


def shared_parts(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Gather the parts of all processes into the whole tensor, which each uses in its own way: gradients are summed."""
    return _cross(x, lambda x: ranks.joined(x, dim), lambda gradient: part_of_sum(gradient, ranks, dim))


def part_of_sum(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return this process's part of the sum of what the processes have."""
    return _cross(x, lambda x: ranks.part_of_sum(x, dim), lambda gradient: shared_parts(gradient, ranks, dim))


class OwnNumbers:
    """Lets a process draw numbers and seeds of its own between :meth:`begin` and :meth:`end`.

    Processes draw the same numbers where they compute the same, and numbers of their own where they do not. Their own follow from
    one number of the CPU's generator, which all processes draw, and from which process this is: what runs again from
    the same state of that generator, as checkpointing does, draws the same numbers.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before: list[tuple[torch.Generator, Tensor]] = []

    def begin(self, x: Tensor) -> None:
        """Draw own numbers from now on, on the CPU and the device of a tensor; nothing where that is fake."""
        self.end()
        if isinstance(x, FakeTensor):
            return
        common = int(torch.randint(2**48, (), device="cpu"))
        for generator in _generators(x.device):
            self._before.append((generator, generator.get_state()))
            generator.manual_seed(common * self._ranks.size + self._ranks.rank)

    def end(self) -> None:
        """Go on with the numbers that all processes draw."""
        for generator, state in self._before:
            generator.set_state(state)
        self._before = []

    def __deepcopy__(self, memo: Any) -> OwnNumbers:
        return memo.setdefault(id(self), type(self)(self._ranks))  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._ranks,)


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that what runs on a device draws from; seeds of packing are drawn on the CPU."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
