"""Activation layers that pack the step of their derivative that each element is on, in place of their input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from actbench.methods.fewbit.ops import mask
from actbench.methods.fewbit.ops.activate import activate
from actbench.methods.fewbit.ops.stepwise import decode, encode
from actbench.methods.fewbit.piecewise import Piecewise
from actbench.methods.fewbit.tables import Table
from actbench.packing import savedtensors
from actbench.packing.layout import as_it_lay, constants, in_order, memory_order, told_apart
from actbench.packing.refusals import OWN_BACKWARD, first_order, refuse_exporting
from actbench.packing.replacement import carry_hooks, without_hooks

RELU = "relu"


def function_name(layer: nn.Module) -> str | None:
    """Return the operators' name of the function that a layer computes, or None if they do not have it.

    Layers of transformers hold the torch function that they call; layers that compute it another way round differently.
    """
    kind = type(layer)
    if kind is nn.ReLU:
        return RELU
    if isinstance(layer, nn.GELU) and kind is nn.GELU:
        return "gelu_tanh" if layer.approximate == "tanh" else "gelu"
    if isinstance(layer, nn.SiLU) and kind is nn.SiLU:
        return None if layer.inplace else "silu"
    if kind.__module__ != "transformers.activations":
        return None
    if kind.__name__ == "SiLUActivation":
        return "silu"
    return _gelu_held(getattr(layer, "act", None))


def _gelu_held(held: Any) -> str | None:
    if held is functional.gelu:
        return "gelu"
    if isinstance(held, functools.partial) and held.func is functional.gelu and not held.args:
        return {(): "gelu", (("approximate", "tanh"),): "gelu_tanh"}.get(tuple(held.keywords.items()))
    return None


def fused(
    x: Tensor, function: str, order: list[int] | None, inplace: bool, bounds: Tensor, bits: int, fold: bool
) -> tuple[Tensor, Tensor] | None:
    """Return a function of x and the packed codes of x by one operator, or None if no operator can do it.

    Args:
        x: The input.
        function: Name of the function, as from :func:`function_name`.
        order: Dimensions of x in memory order; None for contiguous.
        inplace: Write the function over x, and return x.
        bounds: float32 ``(2**bits - 1,)``, ascending; unused for ReLU, whose code is its mask.
        bits: Bits of a code.
        fold: Encode ``|x|``.
    """
    if function != RELU:
        return None if inplace or order is not None else activate(x, function, bounds, bits, fold)
    lying = x if order is None else x.permute(order)
    if inplace and lying.is_contiguous():
        return x, mask.relu_(lying)
    output, codes = mask.relu(lying.contiguous())
    output = as_it_lay(output, order)
    if inplace:  # x has gaps
        return x.copy_(output), codes
    # .data: autograd forbids changes of a view that was made in its function
    return (output if order is None else output.data), codes


@dataclass(frozen=True)
class TableSteps:
    """The steps of a table: the gradient is multiplied by the level in place of the derivative.

    Attributes:
        bits: Bits per element, 1 to 8.
        fold: Whether the magnitude is compared.
        bounds: ``2**bits - 1`` numbers, ascending: the code of an element counts those strictly below it.
        levels: ``2**bits`` numbers, one for each code.
        fusible: Whether the layer's one-pass operator, if it has one, gives these codes.
    """

    bits: int
    fold: bool
    bounds: tuple[float, ...]
    levels: tuple[float, ...]

    fusible = True

    @classmethod
    def of(cls, table: Table) -> TableSteps:
        """Return the steps of a table."""
        return cls(table.bits, table.fold, table.borders, table.levels)

    def compared(self, x: Tensor) -> Tensor:
        """Return the numbers to encode for x, contiguous like x: x itself."""
        return x

    def gradient(self, codes: Tensor, levels: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of x from its packed codes, the levels as a tensor and the output's gradient."""
        product: Tensor = decode(codes, levels, grad, self.bits)
        return product


Steps = TableSteps | Piecewise
"""The code that a layer packs of its input, and the gradient that backward computes from it."""


class StepwiseGradient(torch.autograd.Function):
    """An exact activation; backward knows only the step that each element is on."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        exact: Callable[[Tensor], Tensor],
        steps: Steps,
        bounds: Tensor,
        levels: Tensor,
        function: str | None,
    ) -> Tensor:
        """Return ``exact(x)``; save the packed codes and the levels, which belong to the layer.

        With the name of a function, one operator gives output and codes, if it takes such an x. That of ReLU reads
        neither bounds nor levels, which may be None.
        """
        refuse_exporting(*OWN_BACKWARD)
        ctx.steps, ctx.dtype, ctx.order = steps, x.dtype, memory_order(x)
        inplace = getattr(exact, "inplace", False)
        if inplace:
            ctx.mark_dirty(x)
        at_once = None
        if function is not None:
            at_once = fused(x, function, ctx.order, inplace, bounds, steps.bits, steps.fold)
        if at_once is not None:
            output, codes = at_once
        else:
            codes = encode(steps.compared(in_order(x, ctx.order)), bounds, steps.bits, steps.fold)
        if savedtensors.observers:
            savedtensors.packed(x, codes)
        ctx.save_for_backward(told_apart(codes, ctx.order), levels)
        if at_once is not None:
            return output
        if inplace:
            exact(x)
            return x  # not what exact returns: torch.compile does not recognise the marked tensor in it
        return exact(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by the steps, in the memory layout of x."""
        codes, levels = ctx.saved_tensors
        order, dtype = ctx.order, ctx.dtype
        product = ctx.steps.gradient(codes if order is None else codes.view(-1), levels, in_order(grad, order))
        product = as_it_lay(product, order)
        return product if product.dtype == dtype else product.to(dtype), None, None, None, None, None


class StepwiseActivation(nn.Module):
    """An activation layer with the forward pass of the layer it replaces, and steps for its derivative.

    It packs ``steps.bits`` bits an element of the input, and nothing if no gradient is needed. Like the layer it
    replaces, it has no entries in a state_dict. A layer that works in place still does: its input is encoded before it
    is overwritten, and marked as changed for autograd.

    Args:
        exact: The layer to replace; not changed, and its hooks and train/eval flag are carried over.
        steps: A table of its derivative, or any other steps.
        label: Name of the layer when shown.
        like: A tensor on the layer's device, such as a parameter (which may be fake); None for the CPU.
    """

    bounds: Tensor
    levels: Tensor

    def __init__(self, exact: nn.Module, steps: Table | Steps, label: str, like: Tensor | None = None) -> None:
        super().__init__()
        self.steps, self.label = TableSteps.of(steps) if isinstance(steps, Table) else steps, label
        place = torch.empty(0) if like is None else like
        self.register_buffer("bounds", constants(self.steps.bounds, place), persistent=False)
        self.register_buffer("levels", constants(self.steps.levels, place), persistent=False)
        self.exact = without_hooks(exact)
        name = function_name(exact) if self.steps.fusible else None
        self.function = None if name == RELU and isinstance(self.steps, TableSteps) else name  # its kernel has no table
        carry_hooks(exact, self)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name that torch's layers give it)
        """Return what the exact layer returns, bit for bit; the input is of any shape, strides and float type."""
        if not (torch.is_grad_enabled() and input.requires_grad):
            exact: Tensor = self.exact(input)
            return exact
        function, exact_layer, steps = self.function, self.exact, self.steps
        if function == RELU and not getattr(exact_layer, "inplace", False):
            if input.is_contiguous():  # its operator needs no table
                return applied(StepwiseGradient, input, exact_layer, steps, None, None, function)
            function = None
        levels = self.levels  # once: a module looks long for its buffers
        if levels.device != input.device:  # a model over several devices
            levels = self.to(input.device).levels
        return applied(StepwiseGradient, input, exact_layer, steps, self.bounds, levels, function)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StepwiseActivation:
        """Move the layer, but keep its constants float32 in models of half types; fill them after ``to_empty``."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.bounds = constants(self.steps.bounds, self.bounds)
        self.levels = constants(self.steps.levels, self.levels)
        return self

    @property
    def becomes(self) -> str:
        """The name of the layer, such as ``3-bit GELU``."""
        return f"{self.steps.bits}-bit {self.label}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.becomes})"


def applied(function: type[Any], x: Tensor, exact: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
    """Return what an autograd function returns for x and an exact layer; if the layer works in place, that is x.

    Where an autograd function overwrites an input of a graph that ``torch.compile`` makes, torch 2.11 to 2.15 computes
    wrong gradients. So there it overwrites a copy, and the result is copied back; inductor makes neither copy.

    Args:
        function: An autograd function whose first arguments are x and ``exact``.
        x: Its input.
        exact: The layer.
        arguments: Its further arguments.
    """
    overwrites = torch.compiler.is_compiling() and getattr(exact, "inplace", False)
    found: Tensor = function.apply(x.clone() if overwrites else x, exact, *arguments)
    return x.copy_(found) if overwrites else found
