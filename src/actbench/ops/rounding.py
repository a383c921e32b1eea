"""Rounding by chance, so that the mean over seeds is exact; on any device, and on fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.ops.noise import random_words


def lanes(seed: Tensor, count: int, bits: int) -> Tensor:
    """Return the first ``count`` numbers of :func:`actbench.ops.noise.lanes`, also on fake tensors."""
    words = random_words(seed, 0, -(-count * bits // 64))
    shifts = torch.arange(0, 64, bits, device=seed.device)
    cut: Tensor = ((words[:, None] >> shifts) & ((1 << bits) - 1)).flatten()[:count]
    return cut


def stochastic(places: Tensor, seed: Tensor) -> Tensor:
    """Round each number up with the probability of its fractional part, else down.

    Probabilities are multiples of 2**-23, so the mean is off by at most 2**-24. Whole numbers, NaN and infinities stay.
    """
    below = places.floor()
    noise = (lanes(seed, places.numel(), 32) >> 9).float()
    chance = ((noise + 0.5) * 2.0**-23).view(places.shape)
    return below + (chance < places - below)
