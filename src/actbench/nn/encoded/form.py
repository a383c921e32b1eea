"""The number formats of :mod:`actbench.codecs.encodings` as codecs of saved tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from actbench.codecs.encodings import Encoding
from actbench.nn.layout import Layout, flat_of
from actbench.nn.saved.codecs import SMALLEST, Codec, Packed, Parts
from actbench.nn.saved.groups import NOT_FINITE
from actbench.nn.saved.sitestate import SiteState
from actbench.ops.library import DTYPES
from actbench.ops.noise import fresh_seed


@dataclass(frozen=True)
class Encoded(Codec):
    """A number format for the elements of a tensor in memory order; parts are the format's.

    Attributes:
        encoding: The format; for saved tensors it must have a fixed rate, since parts must follow from the shape.
    """

    encoding: Encoding

    def why_not(self, x: Tensor) -> str | None:
        """Return why the format cannot take a tensor, or None."""
        reason = super().why_not(x)
        if reason is None and x.dtype != torch.bool and not gains(x, self.encoding):
            return f"no larger than in {self.encoding.spec}"
        return reason

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return the format's parts, with fresh noise."""
        return self.encoding.encode(flat, fresh_seed())

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
        if found <= largest:
            return None
        if not math.isfinite(found):
            return NOT_FINITE
        return f"values beyond {largest:.5g}, which {self.encoding.spec} may not bring back finite"


@torch.no_grad()
def encoded(x: Tensor, encoding: Encoding) -> Packed:
    """Return a tensor in a number format, with fresh noise.

    Args:
        x: float32, float16, bfloat16 or float64, of any shape and strides.
        encoding: The format.
    """
    return Packed(Encoded(encoding), Layout.of(x), encoding.encode(flat_of(x), fresh_seed()))


def through(x: Tensor, encoding: Encoding) -> Tensor:
    """Return a tensor rounded to a number format, laid out as x; arguments as for :func:`encoded`."""
    return encoded(x, encoding).unpack()


def takes(x: Tensor) -> bool:
    """Return whether number formats take a tensor: it is floating point, and not too small to gain."""
    return x.layout == torch.strided and x.dtype in DTYPES and x.numel() >= SMALLEST


def gains(x: Tensor, encoding: Encoding) -> bool:
    """Return whether a tensor takes fewer bytes in a format; true for a format that only simulates."""
    return not encoding.stored or encoding.packed_bytes(x.shape, x.dtype) < x.numel() * x.element_size()
