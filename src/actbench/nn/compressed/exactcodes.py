"""What has an exact small code: the functions of torch, and the layers that call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.nn.activations import function_of
from actbench.nn.compressed import averages, dropout, pool, relu
from actbench.nn.piecewise import Piecewise
from actbench.nn.replacement import standing_in
from actbench.nn.stepwise import StepwiseActivation

_C: Any = torch._C._nn


class SmallCodes(dict[Callable[..., Any], Callable[..., Any]]):
    """Rules for :class:`~actbench.nn.overrides.Intercepted`; a copy or pickle of them is made anew."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return small_codes, ()


def small_codes() -> SmallCodes:
    """Return the rules by which a model keeps exact small codes for rectifiers, dropout and pools.

    Functions, methods and those that overwrite their input are replaced, under each name that torch has for them.
    """
    return SmallCodes(_rectifiers() | _overwriting() | _dropouts() | _pools())


def _rectifiers() -> dict[Any, Callable[..., Any]]:
    return {
        F.relu: relu.relu,
        torch.relu: relu.relu,
        Tensor.relu: relu.relu,
        F.leaky_relu: relu.leaky_relu,
        F.relu6: relu.relu6,
        F.hardtanh: relu.hardtanh,
        F.hardsigmoid: relu.hardsigmoid,
        F.hardshrink: relu.hardshrink,
        Tensor.hardshrink: relu.hardshrink,
        F.softshrink: relu.softshrink,
        F.threshold: relu.threshold,
        torch.threshold: relu.threshold,
    }


def _overwriting() -> dict[Any, Callable[..., Any]]:
    return {
        torch.relu_: partial(relu.relu, inplace=True),
        Tensor.relu_: partial(relu.relu, inplace=True),
        _C.leaky_relu_: partial(relu.leaky_relu, inplace=True),
        _C.hardtanh_: partial(relu.hardtanh, inplace=True),
        torch.threshold_: partial(relu.threshold, inplace=True),
    }


def _dropouts() -> dict[Any, Callable[..., Any]]:
    return {
        F.dropout: dropout.dropout,
        F.dropout1d: dropout.dropout1d,
        F.dropout2d: dropout.dropout2d,
        F.dropout3d: dropout.dropout3d,
        torch.dropout: _train_dropout,
        torch.dropout_: partial(_train_dropout, inplace=True),
    }


def _train_dropout(input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:  # noqa: A002
    return dropout.dropout(input, p, train, inplace)


def _pools() -> dict[Any, Callable[..., Any]]:
    return {
        F.max_pool1d: pool.max_pool1d,
        F.max_pool2d: pool.max_pool2d,
        F.max_pool3d: pool.max_pool3d,
        torch.max_pool1d: pool.max_pool1d,
        torch.max_pool2d: pool.max_pool2d,
        torch.max_pool3d: pool.max_pool3d,
        F.avg_pool1d: averages.avg_pool1d,
        F.avg_pool2d: averages.avg_pool2d,
        F.avg_pool3d: averages.avg_pool3d,
        F.adaptive_avg_pool1d: averages.adaptive_avg_pool1d,
        F.adaptive_avg_pool2d: averages.adaptive_avg_pool2d,
        F.adaptive_avg_pool3d: averages.adaptive_avg_pool3d,
    }


def _pooled(function: Callable[..., Any]) -> Callable[[Any, Tensor], Any]:
    def call(layer: Any, x: Tensor) -> Any:
        given = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices)
        return function(x, *given)

    return call


def _dropped(function: Callable[..., Tensor]) -> Callable[[Any, Tensor], Any]:
    return lambda layer, x: function(x, layer.p, layer.training, layer.inplace)


def _averaged(function: Callable[..., Tensor]) -> Callable[[Any, Tensor], Any]:
    def call(layer: Any, x: Tensor) -> Any:
        given = (layer.kernel_size, layer.stride, layer.padding, layer.ceil_mode, layer.count_include_pad)
        return function(x, *given, *((layer.divisor_override,) if hasattr(layer, "divisor_override") else ()))

    return call


def _averaged_to(function: Callable[..., Tensor]) -> Callable[[Any, Tensor], Any]:
    return lambda layer, x: function(x, layer.output_size)


_CALLS: dict[type[nn.Module], Callable[[Any, Tensor], Any]] = {
    nn.ReLU: lambda layer, x: relu.relu(x, layer.inplace),
    nn.Dropout: _dropped(dropout.dropout),
    nn.Dropout1d: _dropped(dropout.dropout1d),
    nn.Dropout2d: _dropped(dropout.dropout2d),
    nn.Dropout3d: _dropped(dropout.dropout3d),
    nn.MaxPool1d: _pooled(pool.max_pool1d),
    nn.MaxPool2d: _pooled(pool.max_pool2d),
    nn.MaxPool3d: _pooled(pool.max_pool3d),
    nn.AvgPool1d: _averaged(averages.avg_pool1d),
    nn.AvgPool2d: _averaged(averages.avg_pool2d),
    nn.AvgPool3d: _averaged(averages.avg_pool3d),
    nn.AdaptiveAvgPool1d: _averaged_to(averages.adaptive_avg_pool1d),
    nn.AdaptiveAvgPool2d: _averaged_to(averages.adaptive_avg_pool2d),
    nn.AdaptiveAvgPool3d: _averaged_to(averages.adaptive_avg_pool3d),
}

_STEPPED = (nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold)


def _coded_class(kind: type[Any], call: Callable[[Any, Tensor], Any]) -> type[nn.Module]:
    """Return a subclass with another forward, and give it a name in this module, by which a pickled layer finds it."""

    def forward(self: Any, input: Tensor) -> Any:  # noqa: A002  (the name that torch's layers give it)
        return call(self, input)

    made = type(f"Coded{kind.__name__}", (kind,), {"forward": forward, "__module__": __name__})
    globals()[made.__name__] = made
    return made


CODED = {kind: _coded_class(kind, call) for kind, call in _CALLS.items()}
"""For exactly these classes, a subclass that keeps an exact small code."""


def coded(layer: nn.Module) -> nn.Module | None:
    """Return a layer with the identity of ``layer`` that keeps an exact small code, or None where there is none for it.

    Rectifiers keep a bit an element, dropout a bit an element or channel, max pools 1 to 8 bits a maximum, average
    pools nothing. A layer with a forward of its own bound on it is left alone.
    """
    kind: type[Any] = type(layer)
    if "forward" in vars(layer):
        return None
    if kind in CODED:
        return standing_in(layer, CODED[kind])
    function = function_of(layer) if kind in _STEPPED else None
    return StepwiseActivation(layer, function, function.label) if isinstance(function, Piecewise) else None
