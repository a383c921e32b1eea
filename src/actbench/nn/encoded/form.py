"""A tensor in a number format of :mod:`actbench.codecs.encodings`, as a form in which tensors are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actbench.codecs.encodings import Encoding
from actbench.nn.keeping.forms import Kept, Parts, flat_of, laid_out, order_of
from actbench.nn.keeping.keeper import FLOATS, SMALLEST
from actbench.ops.seeds import fresh_seed


@dataclass(frozen=True)
class Encoded:
    """A whole tensor in a number format, its elements in the order of its memory; parts are the format's.

    Attributes:
        shape: Of the tensor.
        dtype: Of the tensor.
        order: Its dimensions, widest stride first; None for contiguous.
        encoding: The format.
    """

    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...] | None
    encoding: Encoding
    divisible: bool = False

    @property
    def bits(self) -> float:
        """Bits of an element, with all that is stored beside it."""
        count = self.shape.numel()
        return 8 * self.encoding.packed_bytes((count,), self.dtype) / count

    def restore(self, parts: Parts) -> Tensor:
        """Return the decoded tensor."""
        flat = self.encoding.decode(parts, (self.shape.numel(),), self.dtype)
        if not self.encoding.stored:
            flat = flat.clone()  # it is the part, which must stay as it is for a further backward pass
        return laid_out(flat, self.shape, self.order)

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return rows of the whole tensor."""
        return self.restore(parts)[first:last]

    def seen_as(self, x: Tensor) -> Encoded:
        """Return the form of another view."""
        return replace(self, shape=x.shape, order=order_of(x))


@torch.no_grad()
def encoded(x: Tensor, encoding: Encoding, flat: Tensor | None = None) -> Kept:
    """Return a tensor in a number format, with fresh noise.

    Args:
        x: float32, float16, bfloat16 or float64, of any shape and strides.
        encoding: The format.
        flat: Its elements in the order of its memory, where they are at hand.
    """
    elements = flat_of(x) if flat is None else flat
    return Kept(Encoded(x.shape, x.dtype, order_of(x), encoding), encoding.encode(elements, fresh_seed()))


def through(x: Tensor, encoding: Encoding) -> Tensor:
    """Return what a number format leaves of a tensor, laid out as x; arguments as for :func:`encoded`."""
    kept = encoded(x, encoding)
    return kept.form.restore(kept.parts)


def takes(x: Tensor) -> bool:
    """Return whether a tensor is one that number formats are for: floating point, and not too small to gain."""
    return x.layout == torch.strided and x.dtype in FLOATS and x.numel() >= SMALLEST


def gains(x: Tensor, encoding: Encoding) -> bool:
    """Return whether a tensor takes fewer bytes in a format; what is only simulated is taken to."""
    return not encoding.stored or encoding.packed_bytes(x.shape, x.dtype) < x.numel() * x.element_size()
