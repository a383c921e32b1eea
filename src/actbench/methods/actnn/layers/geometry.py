"""The constants of a convolution, read from torch's layers into one value."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Numbers = int | Sequence[int] | None
"""One number for each spatial dimension, or one for all."""


_backward: Any = torch.ops.aten.convolution_backward.default


def numbers(given: Numbers, dims: int) -> tuple[int, ...]:
    """Return one number for each dimension, as torch reads an argument; nothing for None."""
    if given is None:
        return ()
    if isinstance(given, int):
        return (given,) * dims
    return tuple(given) * dims if len(given) == 1 else tuple(given)


def channels_last(x: Tensor) -> torch.memory_format | None:
    """Return the channels-last format of x; None if x has another layout, or is contiguous too."""
    if x.is_contiguous():
        return None
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return layout if layout is not None and x.is_contiguous(memory_format=layout) else None


@dataclass(frozen=True)
class Geometry:
    """The constants of a convolution, a number for each spatial dimension.

    Attributes:
        padding: Padding with zeros, the same on both sides.
        output_padding: Output padding of a transposed convolution.
        pads: Padding of the input before the convolution, as ``F.pad`` takes it; empty for none.
        mode: Mode of this padding, as ``F.pad`` names it.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    mode: str = "constant"

    @classmethod
    def of(cls, layer: Any, output_padding: Sequence[int] | None = None) -> Geometry:
        """Return the geometry of ``nn.Conv1d`` to ``nn.Conv3d`` or a transposed one.

        ``output_padding`` replaces the layer's if a transposed layer is called with an output size.
        """
        wanted = None if output_padding is None else tuple(output_padding)
        own = vars(layer)
        key, known = _of_a_layer(own), own.get("_geometry")
        if known is None or known[0] != key or known[1] != wanted:  # a layer asks in each pass, and rarely changes
            given: Any = [tuple(value) if isinstance(value, list) else value for value in (*key, wanted)]
            layer._geometry = known = key, wanted, cls.made(*given)
        geometry: Geometry = known[2]
        return geometry

    @classmethod
    def made(
        cls,
        kernel_size: tuple[int, ...],
        stride: Numbers,
        padding: Any,
        dilation: Numbers,
        groups: int,
        padding_mode: str,
        transposed: bool,
        output_padding: Numbers,
        reversed_padding: tuple[int, ...],
        wanted: tuple[int, ...] | None,
    ) -> Geometry:
        """Return the geometry of a layer with these attributes, called with the output padding that is ``wanted``."""
        dims, is_plain = len(kernel_size), padding_mode == "zeros"
        # _conv_forward pads by F.pad in other modes, and then convolves without padding
        padding, dilation = padding if is_plain else 0, numbers(dilation, dims)
        pads: tuple[int, ...] = ()
        if padding == "same":
            totals = [step * (size - 1) for step, size in zip(dilation, kernel_size, strict=True)]
            padding = tuple(total // 2 for total in totals)
            odd = tuple(pad for total in reversed(totals) for pad in (0, total % 2))  # one more on the far side
            pads = odd if any(odd) else ()
        around = numbers(0 if isinstance(padding, str) else padding, dims)  # else the word is "valid"
        given = cls(numbers(stride, dims), around, dilation, groups, pads=pads)
        if transposed:
            return replace(given, transposed=True, output_padding=wanted or numbers(output_padding, dims))
        return given if is_plain else replace(given, pads=reversed_padding, mode=padding_mode)

    def takes(self, x: Tensor) -> bool:
        """Return whether x has the dimensions of an input, with or without a batch."""
        return x.dim() - len(self.stride) in (1, 2)

    def has_batch(self, x: Tensor) -> bool:
        """Return whether x has a batch dimension."""
        return x.dim() == len(self.stride) + 2

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return what torch's function returns, bit for bit."""
        if not self.has_batch(x):
            return self.forward(x.unsqueeze(0), weight, bias).squeeze(0)
        return torch.convolution(self.padded(x) if self.pads else x, weight, bias, *self._constants)

    def backward(self, grad: Tensor, padded: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Any:
        """Return the wanted gradients of a padded batch, the weight and the bias, and None for the others."""
        channels = grad.shape[1]
        return _backward(grad, padded, weight, (channels,), *self._constants, wanted)

    def input_gradient(
        self, grad: Tensor, size: Sequence[int], weight: Tensor, layout: torch.memory_format | None
    ) -> Tensor:
        """Return the gradient of a padded batch, without its values.

        On the CPU this is the opposite convolution: ``convolution_backward`` would copy the batch there, even an
        expanded zero, while on CUDA it reads only the shape. Both give the same bits, except for groups in channels
        last, which use ``convolution_backward``.

        Args:
            grad: Gradient of the output.
            size: Size of the padded batch.
            weight: The weight, as torch's function takes it.
            layout: The channels-last format of the batch; None for contiguous.
        """
        if layout is not None:  # there is no batch from which torch could take the layout of its gradient
            weight = weight.contiguous(memory_format=layout)
        if grad.is_cpu and (self.groups == 1 or (layout is None and grad.is_contiguous())):
            left = self._uncovered(grad.shape[2:], size[2:], weight.shape[2:])
            constants = self.stride, self.padding, self.dilation, not self.transposed, left, self.groups
            return torch.convolution(grad, weight, None, *constants)
        found: Tensor = self.backward(grad, grad.new_zeros(()).expand(tuple(size)), weight, (True, False, False))[0]
        return found

    def _uncovered(self, output: Sequence[int], size: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
        """Return how many of the last elements of the input are under no window; none for a transposed convolution."""
        if self.transposed:
            return (0,) * len(self.stride)
        windows_of = zip(output, size, kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple(
            length + 2 * padding - (windows - 1) * stride - dilation * (taps - 1) - 1
            for windows, length, taps, stride, padding, dilation in windows_of
        )

    def share_inside(self, size: Sequence[int], kernel: Sequence[int]) -> float:
        """Return the share of the elements under all windows that is in the input, not in the zeros around it.

        It is 1 for a transposed convolution, whose windows are on the output. ``size`` and ``kernel`` are spatial.
        """
        return 1.0 if self.transposed else _share_inside(self, tuple(size), tuple(kernel))

    def padded(self, x: Tensor) -> Tensor:
        """Return a batch as it goes into the convolution."""
        return F.pad(x, self.pads, self.mode) if self.pads else x

    def padded_size(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the size that a batch of this size has when padded."""
        if not self.pads:
            return tuple(size)
        added = [sum(self.pads[i : i + 2]) for i in range(0, len(self.pads), 2)]  # the last dimension first
        before = len(size) - len(added)
        return *size[:before], *(length + more for length, more in zip(size[before:], reversed(added), strict=True))

    def unpadded(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of a batch from that of the padded batch; only shape and type of ``x`` are read."""
        if not self.pads:
            return grad
        if self.mode == "constant":
            return F.pad(grad, [-pad for pad in self.pads])
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.padded(leaf), leaf, grad)
        return found

    @functools.cached_property
    def _constants(self) -> tuple[Any, ...]:
        output_padding = self.output_padding or (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, self.transposed, output_padding, self.groups


_of_a_layer = operator.itemgetter(
    "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "transposed", "output_padding",
    "_reversed_padding_repeated_twice",
)  # fmt: skip


@functools.cache
def _share_inside(geometry: Geometry, size: tuple[int, ...], kernel: tuple[int, ...]) -> float:
    share = 1.0
    along = zip(size, kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    for length, taps, stride, padding, dilation in along:
        windows = 1 + (length + 2 * padding - dilation * (taps - 1) - 1) // stride
        places = (window * stride - padding + tap * dilation for window in range(windows) for tap in range(taps))
        share *= sum(0 <= place < length for place in places) / (windows * taps)
    return share
