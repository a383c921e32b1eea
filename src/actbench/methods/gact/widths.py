"""Bits by the type of layer (AGoQ, arXiv 2605.00539)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from actbench.errors import NothingToConvertError
from actbench.packing.hooked import HookedForward
from actbench.packing.hooked.hooks import WidthForward
from actbench.packing.replacement import census, is_linear

_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d

UNCOMPILABLE = ("a model whose layers have bits of their own", "a graph does not tell which of them saves a tensor")
"""What cannot be compiled, and why."""

_SOFTMAX = nn.Softmax, nn.LogSoftmax, nn.Softmax2d


def _is_activation(layer: nn.Module) -> bool:
    # torch.nn.modules.activation holds the classes of softmax and attention as well
    of_torch = type(layer).__module__ == nn.GELU.__module__ and not isinstance(
        layer, (*_SOFTMAX, nn.MultiheadAttention)
    )
    return of_torch or type(layer).__name__.endswith("Activation")


TYPES: Mapping[str, Callable[[nn.Module], bool]] = {
    "linear": is_linear,
    "conv": lambda layer: isinstance(layer, _CONVOLUTIONS),
    "norm": lambda layer: type(layer).__name__.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")),
    "activation": _is_activation,
    "attention": lambda layer: "Attention" in type(layer).__name__ or isinstance(layer, _SOFTMAX),
}
"""The types of layers, each with what tells whether a module is of it."""


def read(text: str) -> tuple[str, int]:
    """Return type and bits of ``linear:4``; raise a ValueError if there is no such type, or bits are not 1 to 8."""
    name, _, bits = text.partition(":")
    if name not in TYPES:
        near = difflib.get_close_matches(name, TYPES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name!r} is no type of layer that widths= knows ({', '.join(TYPES)}){meant}")
    if bits not in tuple("12345678"):
        raise ValueError(f"{text!r}: write {name}:BITS, with a whole number of bits from 1 to 8")
    return name, int(bits)


def check(parts: Sequence[nn.Module], widths: Iterable[tuple[str, int]]) -> None:
    """Raise a NothingToConvertError if no part of a model has a layer of a type."""
    for name, _ in widths:
        if not any(TYPES[name](layer) for part in parts for layer in part.modules()):
            held = census(nn.ModuleList(parts))
            raise NothingToConvertError(f"gact: no layer is of the type {name} of widths=; there are {held}")


def bind(module: nn.Module, widths: Mapping[str, int]) -> None:
    """Give the tensors that layers of these types save bits of their own."""
    for name, bits in widths.items():
        for layer in [layer for layer in module.modules() if TYPES[name](layer)]:
            WidthForward(layer, bits).bind()
    for forward in filter(None, map(HookedForward.of, module.modules() if widths else ())):
        forward.wrapper.uncompilable = UNCOMPILABLE
