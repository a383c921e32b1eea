"""Activations whose derivative has two values: one bit keeps it exactly.

Torch's own backward operator gives the derivative that decides the bit, and backward runs the same operator on a value
that stands for the branch. So kinks, NaN and non-finite gradients are treated as in torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actbench.methods.fewbit.ops.mask import select
from actbench.methods.fewbit.ops.stepwise import decode


@dataclass(frozen=True)
class Backward:
    """Torch's operator of this name that gives the gradient of an input; the operator itself cannot be pickled."""

    name: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of x from that of the output."""
        found: Tensor = getattr(torch.ops.aten, f"{self.name}_backward")(grad, x, *self.arguments)
        return found


@dataclass(frozen=True)
class Piecewise:
    """A function whose derivative has two values.

    Attributes:
        backward: Computes the gradient of the input from the gradient of the output and the input, as torch does.
        bounds: One number; the bit says whether the result of :meth:`compared` is above it.
        levels: An input for which the bit is 0, and one for which it is 1.
        direct: Whether the input itself is compared; otherwise its derivative.
        gate: Whether the gradient passes unchanged where the bit is 1, and is zero elsewhere.
    """

    name: str
    label: str
    backward: Backward
    levels: tuple[float, float]
    # between 0 and the least of the other derivatives, the 1/6 of hardsigmoid
    bounds: tuple[float] = (0.05,)
    direct: bool = False
    gate: bool = True

    bits = 1
    fold = False

    @property
    def fusible(self) -> bool:
        """Whether one operator gives output and bits: only for ReLU."""
        return self.name == "relu"

    def compared(self, x: Tensor) -> Tensor:
        """Return the numbers to encode for x."""
        # ones of the shape of x, without its memory
        return x if self.direct else self.backward(x.new_ones(()).expand_as(x), x).contiguous()

    def gradient(self, codes: Tensor, levels: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the input, bit-equal to the exact layer's."""
        if self.gate:
            return select(codes, grad)
        return self.backward(grad, decode(codes, levels, torch.ones_like(grad), self.bits))


def relu() -> Piecewise:
    """Return ReLU: 1 above zero."""
    return threshold(0.0, "relu", "ReLU")


def threshold(at: float, name: str = "threshold", label: str = "Threshold") -> Piecewise:
    """Return the function whose derivative is 1 above ``at``."""
    beside = 1 + abs(at)
    return Piecewise(name, label, Backward("threshold", (at,)), (at - beside, at + beside))


def leaky_relu(negative_slope: float) -> Piecewise:
    """Return the function whose derivative is 1 above zero and ``negative_slope`` elsewhere."""
    backward = Backward("leaky_relu", (negative_slope, False))
    # the input is compared, since the slope may be any number
    return Piecewise("leaky_relu", "LeakyReLU", backward, (-1.0, 1.0), bounds=(0.0,), direct=True, gate=False)


def hardtanh(low: float, high: float, name: str = "hardtanh", label: str = "Hardtanh") -> Piecewise:
    """Return the function whose derivative is 1 between two limits."""
    return Piecewise(name, label, Backward("hardtanh", (low, high)), (high + 1 + abs(high), (low + high) / 2))


def hardsigmoid() -> Piecewise:
    """Return the function whose derivative is 1/6 between -3 and 3."""
    return Piecewise("hardsigmoid", "Hardsigmoid", Backward("hardsigmoid"), (4.0, 0.0), gate=False)


def hardshrink(lambd: float) -> Piecewise:
    """Return the function whose derivative is 0 from ``-lambd`` to ``lambd``."""
    return Piecewise("hardshrink", "Hardshrink", Backward("hardshrink", (lambd,)), (0.0, 1 + 2 * abs(lambd)))


def softshrink(lambd: float) -> Piecewise:
    """Return the function whose derivative is 0 from ``-lambd`` to ``lambd``."""
    return Piecewise("softshrink", "Softshrink", Backward("softshrink", (lambd,)), (0.0, 1 + 2 * abs(lambd)))


PIECEWISE = ("relu", "leaky_relu", "threshold", "relu6", "hardtanh", "hardsigmoid", "hardshrink", "softshrink")
"""The functions with two slopes, by name."""
