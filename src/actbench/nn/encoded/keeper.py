"""A keeper of saved tensors that keeps them in a number format in place of groups of few bits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actbench import savedtensors
from actbench.codecs.encodings import Encoding
from actbench.nn.encoded.form import Encoded, encoded, gains
from actbench.nn.keeping import Keeper, Kept, Place
from actbench.nn.keeping.forms import flat_of
from actbench.nn.keeping.keeper import NOT_FINITE


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
        reason = super().why_not(x)
        if reason is None and x.dtype != torch.bool and not gains(x, self.encoding):
            return f"no larger than in {self.encoding.spec}"
        return reason

    def stands_for(self, x: Tensor, kept: Kept) -> None:
        """Say that a tensor is what was decoded of parts: it is then kept as them, without being encoded again.

        The parts live as long as the storage of the tensor, or as what autograd holds of them.
        """
        savedtensors.packed(x, *kept.parts, by=self)
        known = (kept, Place("output of a module", kept.form.bits))
        self._sharing.remember(flat_of(x), lambda: known)

    def _lost(self, x: Tensor, kept: Kept) -> str | None:
        """Return which values may not come back finite, by the ends of all, which take no memory."""
        if not isinstance(kept.form, Encoded):
            return None
        least, most = x.detach().aminmax()
        found, largest = torch.maximum(-least, most).item(), self.encoding.largest(x.dtype)
        if found <= largest:
            return None
        if not math.isfinite(found):
            return NOT_FINITE
        return f"values beyond {largest:.5g}, which {self.encoding.spec} may not bring back finite"

    def _grouped(self, x: Tensor, flat: Tensor, place: Place) -> Kept:
        return encoded(x, self.encoding, flat)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(EncodedKeeper, self.encoding), ()
