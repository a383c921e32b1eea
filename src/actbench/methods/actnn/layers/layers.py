"""The layers and functions with a form that packs their input or an exact small code of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import type_before_parametrizations

from actbench.methods.actnn.layers import batchnorm, convolution, dropout, linear, norms as norms_, pool, relu
from actbench.methods.actnn.layers.ingraph import InGraph, give_form
from actbench.methods.actnn.layers.savedinput import Compressed
from actbench.methods.fewbit.activations import function_of
from actbench.methods.fewbit.piecewise import Piecewise
from actbench.methods.fewbit.stepwise import StepwiseActivation
from actbench.model.records import Unreached
from actbench.packing import SavedTensors, SiteState
from actbench.packing.replacement import is_conv1d, made_class, parametrized, standing_in

_C: Any = torch._C._nn


class SmallCodes(dict[Callable[..., Any], Callable[..., Any]]):
    """Rules for :class:`~actbench.packing.wrapped.Intercepted`; a copy or an unpickled one is made anew."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return small_codes, ()


def small_codes() -> SmallCodes:
    """Return functions that replace torch's rectifiers, dropout and pools and pack exact small codes, by name."""
    return SmallCodes(_RECTIFIERS | _OVERWRITING | _DROPOUTS | _POOLS)


def _train_dropout(input: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:  # noqa: A002
    return dropout.dropout(input, p, train, inplace)


Functions = dict[Any, Callable[..., Any]]

_RECTIFIERS: Functions = {
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
# F.leaky_relu_ and F.hardtanh_ are these functions of torch._C._nn under another name
_OVERWRITING: Functions = {
    torch.relu_: partial(relu.relu, inplace=True),
    Tensor.relu_: partial(relu.relu, inplace=True),
    _C.leaky_relu_: partial(relu.leaky_relu, inplace=True),
    _C.hardtanh_: partial(relu.hardtanh, inplace=True),
    torch.threshold_: partial(relu.threshold, inplace=True),
}
_DIMS = (1, 2, 3)
_DROPOUTS: Functions = {
    F.dropout: dropout.dropout,
    torch.dropout: _train_dropout,
    torch.dropout_: partial(_train_dropout, inplace=True),
} | {getattr(F, f"dropout{dims}d"): partial(dropout.channel_dropout, dims) for dims in _DIMS}
_POOLS: Functions = {
    getattr(place, f"{name}{dims}d"): partial(pool_of, dims)
    for place, name, pool_of in (
        (F, "max_pool", pool.max_pool),
        (torch, "max_pool", pool.max_pool),
        (F, "avg_pool", pool.avg_pool),
        (F, "adaptive_avg_pool", pool.adaptive_avg_pool),
    )
    for dims in _DIMS
}

_DROPPING = ("p", "training", "inplace")
_MAXIMA = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVERAGING = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")

_CALLS: dict[type[nn.Module], tuple[Callable[..., Any], tuple[str, ...]]] = {
    nn.ReLU: (relu.relu, ("inplace",)),
    nn.Dropout: (dropout.dropout, _DROPPING),
    nn.AvgPool1d: (partial(pool.avg_pool, 1), _AVERAGING),
    nn.AvgPool2d: (partial(pool.avg_pool, 2), (*_AVERAGING, "divisor_override")),
    nn.AvgPool3d: (partial(pool.avg_pool, 3), (*_AVERAGING, "divisor_override")),
}
"""The function that a layer of a class calls, and the attributes that it passes, in order."""

for _dims in _DIMS:
    _CALLS[getattr(nn, f"Dropout{_dims}d")] = partial(dropout.channel_dropout, _dims), _DROPPING
    _CALLS[getattr(nn, f"MaxPool{_dims}d")] = partial(pool.max_pool, _dims), _MAXIMA
    _CALLS[getattr(nn, f"AdaptiveAvgPool{_dims}d")] = partial(pool.adaptive_avg_pool, _dims), ("output_size",)

_STEPPED = (nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold)


def _coded_class(kind: type[Any], function: Callable[..., Any], attributes: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass with another forward, named in this module so that pickle finds it."""

    def forward(self: Any, input: Tensor) -> Any:  # noqa: A002  (the name that torch's layers give it)
        if torch.compiler.is_compiling() and self.form is not None:
            return self.in_graph(input)
        return function(input, *(getattr(self, name) for name in attributes))

    made = type(f"Coded{kind.__name__}", (InGraph, kind), {"forward": forward, "__module__": __name__})
    globals()[made.__name__] = made
    return made


CODED = {kind: _coded_class(kind, *call) for kind, call in _CALLS.items()}
"""For exactly these classes, a subclass that packs an exact small code."""


def coded(layer: nn.Module) -> nn.Module | None:
    """Return a layer with the identity of ``layer`` that packs an exact small code, or None.

    Rectifiers pack a bit an element, dropout a bit an element or channel, max pools 1 to 8 bits a maximum, average
    pools nothing. A layer with a bound forward stays as it is.
    """
    kind: type[Any] = type(layer)
    if "forward" in vars(layer):
        return None
    if kind in CODED:
        return _named(standing_in(layer, CODED[kind]))
    function = function_of(layer) if kind in _STEPPED else None
    return StepwiseActivation(layer, function, function.label) if isinstance(function, Piecewise) else None


STANDS_FOR: dict[type[nn.Module], type[Compressed]] = {
    nn.Conv1d: convolution.CompressedConv1d,
    nn.Conv2d: convolution.CompressedConv2d,
    nn.Conv3d: convolution.CompressedConv3d,
    nn.ConvTranspose1d: convolution.CompressedConvTranspose1d,
    nn.ConvTranspose2d: convolution.CompressedConvTranspose2d,
    nn.ConvTranspose3d: convolution.CompressedConvTranspose3d,
    nn.Linear: linear.CompressedLinear,
    nn.BatchNorm1d: batchnorm.CompressedBatchNorm1d,
    nn.BatchNorm2d: batchnorm.CompressedBatchNorm2d,
    nn.BatchNorm3d: batchnorm.CompressedBatchNorm3d,
    nn.SyncBatchNorm: batchnorm.CompressedSyncBatchNorm,
    nn.LayerNorm: norms_.CompressedLayerNorm,
    nn.GroupNorm: norms_.CompressedGroupNorm,
}
"""For exactly these classes, a subclass with another forward."""

_NORMS = (batchnorm.BatchNorm, norms_.CompressedLayerNorm, norms_.CompressedGroupNorm)


def compressed(layer: nn.Module, packer: SavedTensors, site: SiteState, *, norms: bool = True) -> nn.Module | None:
    """Return a layer with the identity of ``layer`` that packs its input or an exact small code; None if there is none.

    Args:
        layer: Not changed; the new layer shares its parameters, buffers, hooks and train/eval flag.
        packer: The packer of the model.
        site: The site of the layer's input.
        norms: Whether norms are replaced too.
    """
    if "forward" in vars(layer):
        return None
    kind: type[Any] = type(layer)
    cls = compressed_class(kind)  # type: ignore[arg-type]  # mypy: a Module class is not Hashable
    if cls is None:
        return coded(layer)
    if not norms and is_norm(cls):
        return None
    return _named(standing_in(layer, cls, packer=packer, site=site))


def _named(layer: nn.Module) -> nn.Module:
    """Return a layer that has a form."""
    give_form(layer)
    return layer


@functools.cache
def compressed_class(kind: type[Any]) -> type[Compressed] | None:
    """Return the class that replaces exactly ``kind``, or None."""
    if is_conv1d(kind):
        return made_class("CompressedConv1D", (linear.Linear, kind), compressed_class, kind, transposed=True)
    return STANDS_FOR.get(kind)


def parametrized_layers(
    model: nn.Module, wanted: Callable[[type[Compressed]], bool] = lambda _: True
) -> tuple[Unreached, ...]:
    """Return the layers that would pack their input, but stay as they are because their tensors are parametrized.

    Args:
        model: The model.
        wanted: Whether a class of layers that pack their input is asked for.
    """
    found = []
    for path, layer in model.named_modules():
        reason = parametrized(layer)
        cls = reason and compressed_class(type_before_parametrizations(layer))
        if reason and cls and wanted(cls):
            found.append(Unreached(path=path, kind=type(layer).__name__, reason=reason))
    return tuple(found)


def is_norm(cls: type[Compressed]) -> bool:
    """Return whether a class of layers that pack their input is one of norms."""
    return issubclass(cls, _NORMS)


def is_convolution(cls: type[Compressed]) -> bool:
    """Return whether a class of layers that pack their input is one of convolutions."""
    return issubclass(cls, convolution.Direct | convolution.Transposed)


def fan_in(layer: Compressed) -> int | None:
    """Return the number of input elements that an output element is a sum of, on average; None for a norm."""
    weight: Any = getattr(layer, "weight", None)
    if isinstance(layer, convolution.Transposed):
        return int(weight[:, 0].numel()) // layer.groups // math.prod(layer.stride)
    if isinstance(layer, linear.Linear) and layer.transposed:
        return int(weight.shape[0])
    if isinstance(layer, linear.Linear | convolution.Direct):
        return int(weight[0].numel())
    return None
