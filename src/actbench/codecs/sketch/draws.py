"""Rows drawn by a seed. Of 64 random bits each, so that what a remainder adds to a chance is below rows / 2**63."""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.ops.words import random_words

_POSITIVE = (1 << 63) - 1
_FRACTION_BITS = 52


def uniform(seed: Tensor, rows: int, size: int, device: torch.device) -> Tensor:
    """Return ``size`` rows drawn with replacement, each with the same chance: (size,) int64."""
    return (random_words(seed, 0, size, device) & _POSITIVE) % rows


def distinct(seed: Tensor, rows: int, size: int, device: torch.device) -> Tensor:
    """Return ``size`` different rows in random order: (size,) int64. Sorts a word per row, 24 bytes a row meanwhile."""
    return random_words(seed, 0, rows, device).argsort(stable=True)[:size]


def fractions(seed: Tensor, size: int, device: torch.device) -> Tensor:
    """Return ``size`` numbers from 0 to below 1: (size,) float64, of 52 random bits each."""
    bits = random_words(seed, 0, size, device) & ((1 << _FRACTION_BITS) - 1)
    return bits.double() * 2.0**-_FRACTION_BITS
