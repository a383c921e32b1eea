"""Logarithms of probabilities, kept as the probabilities that backward makes of them.

Log-softmax saves its result and needs the power of it: the error of a logarithm would be a factor, which does not
average out. A class that is masked has the logarithm minus infinity, which no group of codes can hold, and the
probability 0, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actbench.nn.keeping import Form, Parts


@dataclass(frozen=True)
class Logarithms:
    """The parts are those of the powers.

    Attributes:
        inner: How the powers are kept.
    """

    inner: Form
    divisible: bool = False

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return self.inner.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.inner.dtype

    @property
    def bits(self) -> float:
        """Bits of an element."""
        return self.inner.bits

    def restore(self, parts: Parts) -> Tensor:
        """Return the tensor; minus infinity where a power was 0, or was rounded to it."""
        return logarithms(self.inner.restore(parts))

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return rows of the whole tensor."""
        return self.restore(parts)[first:last]

    def seen_as(self, x: Tensor) -> Logarithms:
        """Return the form of another view."""
        return replace(self, inner=self.inner.seen_as(x))


def logarithms(powers: Tensor) -> Tensor:
    """Return the logarithms of powers, over them; a format that does not keep signs may have made one less than 0."""
    return powers.clamp_(min=0).log_()
