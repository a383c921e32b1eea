"""Which layers have a form that packs its input."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import nn

from actbench.nn.compressed import batchnorm, convolution, linear
from actbench.nn.compressed import norms as norms_
from actbench.nn.compressed.exactcodes import coded
from actbench.nn.compressed.savedinput import Compressed
from actbench.nn.replacement import standing_in
from actbench.nn.saved import SavedTensors, SiteState

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
    """Return a layer with the identity of ``layer`` that packs its input, or an exact small code.

    Args:
        layer: Not changed. Its parameters, buffers, hooks and train/eval flag are shared with the new layer.
        packer: Keeps for the whole model.
        site: The layer's input.
        norms: Whether norms have such a form.

    Returns:
        A layer of a subclass (another layer for rectifiers other than ReLU), or None for a class that has no such
        form, and for a layer on which another forward is bound.
    """
    if "forward" in vars(layer):
        return None
    kind: type[Any] = type(layer)
    cls = compressed_class(kind)  # type: ignore[arg-type]  # mypy: a Module class is not Hashable
    if cls is None:
        return coded(layer)
    if not norms and issubclass(cls, _NORMS):
        return None
    return standing_in(layer, cls, packer=packer, site=site)  # type: ignore[return-value]  # it is of a layer too


@functools.cache
def compressed_class(kind: type[Any]) -> type[Compressed] | None:
    """Return the class that stands in for exactly ``kind``, or None."""
    if linear.is_conv1d(kind):
        return type("CompressedConv1D", (linear.Linear, kind), {"transposed": True, "__module__": __name__})
    return STANDS_FOR.get(kind)


def fan_in(layer: Compressed) -> int | None:
    """Return how many elements of a layer's input each element of its output is made of; None of a norm.

    Of a transposed convolution with a stride that is the average.
    """
    weight: Any = getattr(layer, "weight", None)
    if isinstance(layer, convolution.Transposed):
        return int(weight[:, 0].numel()) // layer.groups // math.prod(layer.stride)
    if isinstance(layer, linear.Linear) and layer.transposed:
        return int(weight.shape[0])
    if isinstance(layer, linear.Linear | convolution.Direct):
        return int(weight[0].numel())
    return None
