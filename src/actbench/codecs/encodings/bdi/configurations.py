from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

BATCH: Final = 64
"""Codes of a batch; the last may have fewer."""

BASE_BITS: Final = 8

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Configuration:
    """How a batch is kept.

    Attributes:
        immediate: Whether the implied base zero is a source; then it is the first.
        bases: How many bases are stored.
        delta: Bits of a difference.
        masked: Whether zeros are left out.
    """

    immediate: bool
    bases: int
    delta: int
    masked: bool

    @property
    def selector(self) -> int:
        """Bits of the number of a source."""
        return (self.immediate + self.bases - 1).bit_length()

    @property
    def field(self) -> int:
        """Bits of a field."""
        return self.selector + self.delta

    @property
    def half(self) -> int:
        """By how much a base lies above the lowest code that it covers."""
        return (1 << self.delta) >> 1

    def bits(self, kept: Counts) -> Counts:
        """Return the bits of batches with so many fields; the byte for the configuration is not among them."""
        return kept * self.field + BASE_BITS * self.bases + BATCH * self.masked


@functools.cache
def configurations(bits: int, bases: int, zeros: bool) -> tuple[Configuration, ...]:
    """Return the configuration that keeps codes of ``bits`` bits whole, then all others from short fields to long.

    Args:
        bits: Of a code, at most 8.
        bases: The most bases of a batch, at most 3.
        zeros: Whether there are configurations with a mask.
    """
    sources = [(True, 0), *((immediate, count) for count in range(1, bases + 1) for immediate in (False, True))]
    others = [
        Configuration(immediate, count, delta, masked)
        for immediate, count in sources
        for delta in range(bits)
        for masked in ((False, True) if zeros else (False,))
    ]
    whole = Configuration(immediate=True, bases=0, delta=bits, masked=False)
    return (whole, *sorted(others, key=lambda each: (each.field, each.masked, each.bases)))
