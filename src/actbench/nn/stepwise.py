"""Activation layers that keep, in place of their input, which step of their derivative each element is on."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench.codecs.tables import Table
from actbench.nn.firstorder import first_order
from actbench.ops.stepwise import decode, encode


class StepwiseGradient(torch.autograd.Function):
    """An exact activation whose derivative in backward is piecewise constant."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exact: Callable[[Tensor], Tensor], bounds: Tensor, levels: Tensor, bits: int, fold: bool
    ) -> Tensor:
        """Return ``exact(x)``; keep the packed codes and the levels, which belong to the layer."""
        ctx.bits, ctx.dtype, ctx.order = bits, x.dtype, _memory_order(x)
        ctx.save_for_backward(encode(_in_order(x, ctx.order), bounds, bits, fold), levels)
        return exact(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return ``grad * levels[code]``, laid out in memory as x was."""
        codes, levels = ctx.saved_tensors
        product = decode(codes, levels, _in_order(grad, ctx.order), ctx.bits)
        if ctx.order is not None:
            product = product.permute(sorted(range(product.dim()), key=ctx.order.__getitem__))
        return product.to(ctx.dtype), None, None, None, None, None


class StepwiseActivation(nn.Module):
    """An activation layer with the forward pass of the layer it replaces and the derivative of a table.

    Kept for backward: ``table.bits`` bits per element of the input; nothing where no gradient is needed. The layer has
    no entries in a state_dict, like the one it replaces.

    Args:
        exact: The layer to replace; not changed, and its hooks and train/eval flag are carried over.
        table: Bounds and levels of its derivative.
        label: What the layer is called when shown.
        like: A tensor where the layer will run, such as a parameter of the model (which may be fake); None for the CPU.
    """

    bounds: Tensor
    levels: Tensor

    def __init__(self, exact: nn.Module, table: Table, label: str, like: Tensor | None = None) -> None:
        super().__init__()
        self.table, self.label = table, label
        place = torch.empty(0) if like is None else like
        self.register_buffer("bounds", _constants(table.borders, place), persistent=False)
        self.register_buffer("levels", _constants(table.levels, place), persistent=False)
        self.exact = _without_hooks(exact)
        for name in _hook_tables(exact):
            vars(self)[name] = vars(exact)[name]
        self.train(exact.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit.

        Args:
            input: Any shape and strides; float32, float16, bfloat16 or float64.
        """
        if not (torch.is_grad_enabled() and input.requires_grad):
            exact: Tensor = self.exact(input)
            return exact
        if self.levels.device != input.device:  # a model over several devices
            self.to(input.device)
        output: Tensor = StepwiseGradient.apply(
            input, self.exact, self.bounds, self.levels, self.table.bits, self.table.fold
        )
        return output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StepwiseActivation:
        """Move the layer, but keep its constants: float32 in a model of halves, and filled after ``to_empty``."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.bounds = _constants(self.table.borders, self.bounds)
        self.levels = _constants(self.table.levels, self.levels)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.table.bits}-bit {self.label})"


def _constants(values: Iterable[float], like: Tensor) -> Tensor:
    """Return float32 values where ``like`` is, fake if it is."""
    if isinstance(like, FakeTensor):
        with like.fake_mode:
            return torch.tensor(values, dtype=torch.float32, device=like.device)
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def _memory_order(x: Tensor) -> list[int] | None:
    """Return the dimensions in the order in which they lie in memory, widest stride first; None for contiguous."""
    return None if x.is_contiguous() else sorted(range(x.dim()), key=x.stride, reverse=True)


def _in_order(x: Tensor, order: list[int] | None) -> Tensor:
    """Return x with its dimensions in this order, contiguous; no copy where they lie so in memory."""
    return (x if order is None else x.permute(order)).contiguous()


def _hook_tables(module: nn.Module) -> list[str]:
    return [name for name in vars(nn.Module()) if "hook" in name]


def _without_hooks(module: nn.Module) -> nn.Module:
    """Return a module that computes the same; hooks belong to the layer that stands in the model."""
    bare = copy.copy(module)
    for name in _hook_tables(module):
        vars(bare)[name] = OrderedDict() if isinstance(vars(module)[name], dict) else vars(nn.Module())[name]
    return bare
