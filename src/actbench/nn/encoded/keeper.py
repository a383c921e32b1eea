"""A keeper of saved tensors that keeps them in a number format in place of groups of few bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench import savedtensors
from actbench.codecs.encodings import Encoding
from actbench.nn.encoded.form import Encoded, gains
from actbench.nn.keeping import Keeper, Kept, Place
from actbench.nn.keeping.forms import AsItIs, order_of
from actbench.nn.keeping.keeper import FLOATS
from actbench.nn.layout import in_order, memory_order
from actbench.ops.seeds import fresh_seed


class EncodedKeeper(Keeper):
    """Keeps floating-point tensors in a number format, truth values in 1 bit; a copy of it knows no tensor.

    Args:
        encoding: The format; of fixed rate, since the parts of a tensor must follow from its shape.
    """

    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.encoding = encoding

    def why_not(self, x: Tensor) -> str | None:
        """Return why a tensor is kept as it is, or None where it is packed."""
        if isinstance(x, nn.Parameter):  # gathered by FSDP for the time of a layer, it is none of the model's own
            return "a parameter"
        reason = super().why_not(x)
        if reason is None and x.dtype != torch.bool and not gains(x, self.encoding):
            return f"no larger than in {self.encoding.spec}"
        return reason

    def keep(self, x: Tensor, place: Place) -> Kept:
        """Return a tensor as it is kept: whole, where it is looked at and holds a value that is not finite."""
        if place.guarded and x.dtype in FLOATS and not isinstance(x, FakeTensor) and _is_infinite(x):
            place.begin(x)
            savedtensors.left(x, "values that are not finite")
            return Kept(AsItIs(x.shape, x.dtype), (x,))
        return super().keep(x, place)

    def stands_for(self, x: Tensor, kept: Kept) -> None:
        """Say that a tensor is what was decoded of parts: it is then kept as them, without being encoded again.

        The parts live as long as the storage of the tensor, or as what autograd holds of them.
        """
        savedtensors.packed(x, *kept.parts)
        known = (kept, Place("output of a module", kept.form.bits))
        self._sharing.remember(in_order(x.detach(), memory_order(x)).view(-1), lambda: known)

    def _grouped(self, x: Tensor, flat: Tensor, place: Place) -> Kept:
        return Kept(Encoded(x.shape, x.dtype, order_of(x), self.encoding), self.encoding.encode(flat, fresh_seed()))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(EncodedKeeper, self.encoding), ()


def _is_infinite(x: Tensor) -> bool:
    """Return whether a value is not finite, from the ends of all, which takes no memory; on a device, wait for it."""
    if not x.numel():
        return False
    least, most = x.detach().aminmax()
    return not bool(least.isfinite() & most.isfinite())
