"""Tensors that wait in a number format of :mod:`actbench.methods.formats.encodings`: saved ones, and parameter
gradients.

The gradients wait for the step of an optimizer, which gets them one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor, nn, optim
from torch.utils.weak import WeakTensorKeyDictionary

from actbench.errors import ConversionError
from actbench.methods.actnn.groups import NOT_FINITE
from actbench.methods.formats.encodings import Encoding, Smaq
from actbench.ops import noise
from actbench.ops.library import DTYPES
from actbench.ops.noise import fresh_seed
from actbench.packing.codecs import SMALLEST, Codec, Packed, Parts
from actbench.packing.layout import Layout, flat_of
from actbench.packing.sitestate import SiteState
from actbench.scheme.wrapped import WrappedOptimizer


@dataclass(frozen=True)
class Encoded(Codec):
    """A number format for the elements of a tensor in memory order; parts are the format's.

    Attributes:
        encoding: The format; for saved tensors it must have a fixed rate, since parts must follow from the shape.
    """

    encoding: Encoding

    @property
    def compiles(self) -> bool:
        """Whether hooks may pack by the format in graphs of ``torch.compile``: SmaQ alone was tried."""
        return isinstance(self.encoding, Smaq)

    def why_not(self, x: Tensor) -> str | None:
        """Return why the format cannot take a tensor, or None."""
        reason = super().why_not(x)
        if reason is None and x.dtype != torch.bool and not gains(x, self.encoding):
            return f"no larger than in {self.encoding.spec}"
        return reason

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return the format's parts, with fresh noise."""
        return self.encoding.encode(flat, fresh_seed(flat))

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the decoded tensor."""
        flat = self.encoding.decode(parts, (layout.elements,), layout.dtype)
        if not self.encoding.stored:
            flat = flat.clone()  # flat is the part itself, which must not change before a further backward pass
        return layout.laid_out(flat)

    def packed_bytes(self, layout: Layout) -> int:
        """Return the format's bytes."""
        return self.encoding.packed_bytes((layout.elements,), layout.dtype)

    def lost(self, flat: Tensor, parts: Parts) -> str | None:
        """Return which values may not decode to finite ones, by the minimum and maximum, which take no memory."""
        least, most = flat.aminmax()
        found, largest = torch.maximum(-least, most).item(), self.encoding.largest(flat.dtype)
        # NaN is not, and comes to the next line
        if found <= largest:
            return None
        if not math.isfinite(found):
            return NOT_FINITE
        return f"values beyond {largest:.5g}, which {self.encoding.spec} may unpack as infinite or NaN"


@torch.no_grad()
def encoded(x: Tensor, encoding: Encoding) -> Packed:
    """Return a tensor in a number format, with fresh noise.

    Args:
        x: float32, float16, bfloat16 or float64, of any shape and strides.
        encoding: The format.
    """
    return Packed(Encoded(encoding), Layout.of(x), encoding.encode(flat_of(x), fresh_seed(x)))


def through(x: Tensor, encoding: Encoding) -> Tensor:
    """Return a tensor rounded to a number format, laid out as x; arguments as for :func:`encoded`."""
    return encoded(x, encoding).unpack()


def takes(x: Tensor) -> bool:
    """Return whether number formats take a tensor: it is floating point, and not too small to gain."""
    return x.layout == torch.strided and x.dtype in DTYPES and x.numel() >= SMALLEST


def gains(x: Tensor, encoding: Encoding) -> bool:
    """Return whether a tensor takes fewer bytes in a format; true for a format that only simulates."""
    return not encoding.stored or encoding.packed_bytes(x.shape, x.dtype) < x.numel() * x.element_size()


class PackedGradients:
    """Takes the gradient off each parameter as soon as a backward pass has computed it, and packs it.

    A further backward pass adds to it: the packed gradient is decoded, added and encoded again. Gradients that are
    sparse, small, or no smaller in the format stay on their parameters.

    Args:
        parameters: The parameters, which this does not keep alive.
        encoding: The format, preferably unbiased.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], encoding: Encoding) -> None:
        self.encoding = encoding
        # keyed by the identity of parameters: tensors compare element by element
        self._packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    @staticmethod
    def bytes_of(parameter: Tensor, encoding: Encoding) -> int:
        """Return the bytes that the gradient of a parameter takes while it waits."""
        packs = takes(parameter) and gains(parameter, encoding)
        return encoding.packed_bytes(parameter.shape, parameter.dtype) if packs else parameter.nbytes

    def restored(self, parameter: Tensor) -> Tensor | None:
        """Return the decoded gradient of a parameter, or None if none is packed."""
        packed: Packed | None = self._packed.get(parameter)  # type: ignore[no-untyped-call]
        return None if packed is None else packed.unpack()

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that packed gradients consist of."""
        for packed in self._packed.values():  # type: ignore[no-untyped-call]
            yield from packed.parts

    def clear(self) -> None:
        """Forget all gradients, as a step begins."""
        # gradients are packed in a backward pass, where seeds only go on (docs/decisions/0046)
        noise.begin()
        self._packed.clear()

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not takes(gradient) or not gains(gradient, self.encoding):
            return
        earlier = self.restored(parameter)
        if earlier is not None:
            gradient.add_(earlier)
        self._packed[parameter] = encoded(gradient, self.encoding)
        parameter.grad = None


BY_PARAMETER: Final = (optim.SGD, optim.Adam, optim.AdamW)
"""Optimizers of torch that treat each parameter separately."""


class StepByParameter(WrappedOptimizer):
    """Steps another optimizer once for each parameter, with only this parameter's gradient in memory.

    The gradients stay packed until :meth:`zero_grad`, as they would stay on the parameters.

    Args:
        inner: The optimizer, which treats each parameter separately, as SGD, Adam and AdamW do.
        packed: The packed gradients; they are cleared.
        by_parameter: Classes of optimizers that treat each parameter separately.

    Raises:
        ConversionError: The optimizer is none of these.
    """

    unscalable: ClassVar[str] = "gradients that wait packed"
    remedy: ClassVar[str] = "leave gradients out of on="

    def __init__(
        self,
        inner: optim.Optimizer,
        packed: PackedGradients,
        by_parameter: tuple[type[optim.Optimizer], ...] = BY_PARAMETER,
    ) -> None:
        if not isinstance(inner, by_parameter):
            raise ConversionError(
                f"gradients cannot wait packed for {type(inner).__name__}, which may need those of all parameters at "
                "once; use SGD, Adam or AdamW, or leave gradients out of on="
            )
        super().__init__(inner)
        self.packed = packed
        packed.clear()

    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Return the decoded gradients that wait for the step, by parameter."""
        found: dict[Tensor, Tensor] = {}
        for parameter in self.parameters():
            gradient = self.packed.restored(parameter)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                found[parameter] = gradient
        return found

    def gradient_parts(self) -> Iterator[Tensor]:
        """Yield the tensors that packed gradients consist of."""
        return self.packed.held()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.packed.clear()
        super().zero_grad(set_to_none)

    def _step(self) -> None:
        self.inner.step()  # steps the parameters whose gradients are not packed
        plain = [(parameter, parameter.grad) for parameter in self.parameters()]
        try:
            # the inner optimizer must not step again those that it has stepped
            for parameter, _ in plain:
                parameter.grad = None
            for parameter, _ in plain:
                self._step_one(parameter)
        finally:
            for parameter, gradient in plain:
                parameter.grad = gradient

    def _step_one(self, parameter: nn.Parameter) -> None:
        """Step a parameter while no other has a gradient: optimizers skip those."""
        gradient = self.packed.restored(parameter)
        if gradient is not None:
            parameter.grad = gradient
            self.inner.step()
            parameter.grad = None
