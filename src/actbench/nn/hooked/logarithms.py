"""Logarithms of probabilities, kept as the probabilities that backward makes of them.

Log-softmax saves its result and needs the power of it: the error of a logarithm would be a factor, which does not
average out. A class that is masked has the logarithm minus infinity, which no group of codes can hold, and the
probability 0, which is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actbench.nn.keeping import Parts
from actbench.nn.keeping.around import Around


@dataclass(frozen=True)
class Logarithms(Around):
    """The parts are those of the powers."""

    def restore(self, parts: Parts) -> Tensor:
        """Return the tensor; minus infinity where a power was 0, or was rounded to it."""
        return logarithms(self.inner.restore(parts))


def logarithms(powers: Tensor) -> Tensor:
    """Return the logarithms of powers, over them; a format that does not keep signs may have made one less than 0."""
    return powers.clamp_(min=0).log_()
