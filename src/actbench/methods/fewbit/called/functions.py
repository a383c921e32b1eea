"""The activation functions of torch under each name that a model may call, and the layer of each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Settings = tuple[tuple[str, Any], ...]
"""Names and values of a layer's arguments."""


class Call(NamedTuple):
    """A call of a function: its input, and the arguments of the layer that computes it."""

    input: Tensor
    settings: Settings


@dataclass(frozen=True)
class Called:
    """A function that a layer computes too.

    Attributes:
        name: Its name for a reader.
        kind: Class of the layer.
        parameters: Names of the arguments after the tensor, in their order; the layer has the same.
        named: Arguments that are passed by name only.
        fixed: Further arguments of the layer.
        examples: Values with which the layer computes functions of different names; some for a class without defaults.
    """

    name: str
    kind: type[nn.Module]
    parameters: tuple[str, ...] = ()
    fixed: Settings = ()
    examples: tuple[Settings, ...] = ((),)
    named: tuple[str, ...] = ()

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """Return the call with these arguments; None for arguments that no layer has, such as ``out``."""
        given = dict(zip(("input", *self.parameters), args, strict=False))
        if len(given) < len(args) or any(name in given for name in kwargs):
            return None
        given.update(kwargs)
        x = given.pop("input", None)
        if not isinstance(x, Tensor):
            return None
        names, defaults = (*self.parameters, *self.named), _DEFAULTS[self.kind]
        for name, value in given.items():
            if name not in names or not isinstance(value, bool | int | float | str):
                return None
        # torch passes all arguments, torch.compile only those of the call; the non-default ones are the same
        settings = [(name, given[name]) for name in names if name in given and given[name] != defaults.get(name)]
        return Call(x, (*settings, *self.fixed))

    def layer(self, settings: Settings) -> nn.Module | None:
        """Return the layer that computes the function with these settings, or None if torch has none."""
        try:
            return self.kind(**dict(settings))
        except AssertionError:  # hardtanh of an empty range
            return None


_INPLACE = ("inplace",)
_OVER = (("inplace", True),)

FUNCTIONS: dict[Any, Called] = {
    F.gelu: Called("F.gelu", nn.GELU, named=("approximate",), examples=((), (("approximate", "tanh"),))),
    F.silu: Called("F.silu", nn.SiLU, _INPLACE),
    F.mish: Called("F.mish", nn.Mish, _INPLACE),
    F.hardswish: Called("F.hardswish", nn.Hardswish, _INPLACE),
    F.hardsigmoid: Called("F.hardsigmoid", nn.Hardsigmoid, _INPLACE),
    F.elu: Called("F.elu", nn.ELU, ("alpha", "inplace")),
    F.elu_: Called("F.elu_", nn.ELU, ("alpha",), _OVER),
    F.celu: Called("F.celu", nn.CELU, ("alpha", "inplace")),
    torch.celu: Called("torch.celu", nn.CELU, ("alpha",)),
    torch.celu_: Called("torch.celu_", nn.CELU, ("alpha",), _OVER),
    F.selu: Called("F.selu", nn.SELU, _INPLACE),
    torch.selu: Called("torch.selu", nn.SELU),
    torch.selu_: Called("torch.selu_", nn.SELU, (), _OVER),
    F.softplus: Called("F.softplus", nn.Softplus, ("beta", "threshold")),
    F.logsigmoid: Called("F.logsigmoid", nn.LogSigmoid),
    torch.sigmoid: Called("torch.sigmoid", nn.Sigmoid),
    torch.special.expit: Called("torch.special.expit", nn.Sigmoid),
    Tensor.sigmoid: Called("Tensor.sigmoid", nn.Sigmoid),
    torch.tanh: Called("torch.tanh", nn.Tanh),
    Tensor.tanh: Called("Tensor.tanh", nn.Tanh),
    F.tanhshrink: Called("F.tanhshrink", nn.Tanhshrink),
    F.softsign: Called("F.softsign", nn.Softsign),
    F.relu: Called("F.relu", nn.ReLU, _INPLACE),
    torch.relu: Called("torch.relu", nn.ReLU),
    torch.relu_: Called("torch.relu_", nn.ReLU, (), _OVER),
    Tensor.relu: Called("Tensor.relu", nn.ReLU),
    Tensor.relu_: Called("Tensor.relu_", nn.ReLU, (), _OVER),
    F.leaky_relu: Called("F.leaky_relu", nn.LeakyReLU, ("negative_slope", "inplace")),
    F.leaky_relu_: Called("F.leaky_relu_", nn.LeakyReLU, ("negative_slope",), _OVER),
    F.relu6: Called("F.relu6", nn.ReLU6, _INPLACE),
    F.hardtanh: Called("F.hardtanh", nn.Hardtanh, ("min_val", "max_val", "inplace")),
    F.hardtanh_: Called("F.hardtanh_", nn.Hardtanh, ("min_val", "max_val"), _OVER),
    F.hardshrink: Called("F.hardshrink", nn.Hardshrink, ("lambd",)),
    Tensor.hardshrink: Called("Tensor.hardshrink", nn.Hardshrink, ("lambd",)),
    F.softshrink: Called("F.softshrink", nn.Softshrink, ("lambd",)),
} | {
    function: Called(name, nn.Threshold, parameters, fixed, ((("threshold", 0.0), ("value", 0.0)),))
    for function, name, parameters, fixed in (
        (F.threshold, "F.threshold", ("threshold", "value", "inplace"), ()),
        (torch.threshold, "torch.threshold", ("threshold", "value"), ()),
        (torch.threshold_, "torch.threshold_", ("threshold", "value"), _OVER),
    )
}
"""``sigmoid_`` and ``tanh_`` are left out: no layer works in place like them. ``F.sigmoid`` and ``F.tanh`` call the
tensor's method.
"""

_DEFAULTS: dict[type[nn.Module], dict[str, Any]] = {
    kind: {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    for kind in {called.kind for called in FUNCTIONS.values()}
}

METHODS: dict[str, Any] = {
    called.name.removeprefix("Tensor."): function
    for function, called in FUNCTIONS.items()
    if called.name.startswith("Tensor.")
}
"""Methods of tensors, by name."""

ALIASES: dict[Any, Any] = {F.sigmoid: Tensor.sigmoid, F.tanh: Tensor.tanh}
"""Functions that cannot be intercepted, with the tensor methods that they call."""
