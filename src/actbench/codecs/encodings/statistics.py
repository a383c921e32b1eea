"""Mean and standard deviation of a tensor, exact or guessed, as SmaQ takes them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from actbench.ops.words import random_words

Statistics = Literal["full", "sample", "range"]


def moments(values: Tensor, statistics: Statistics, samples: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation, 0-d tensors; a deviation of 0 becomes 1.

    Args:
        values: (n,) float32 or float64, n at least 2.
        statistics: Which; see :class:`~actbench.codecs.encodings.simulated.SmaqSimulated`.
        samples: How many elements ``sample`` looks at, at most n.
        seed: Of the choice of samples.
    """
    match statistics:
        case "full":
            deviation, mean = torch.std_mean(values)
        case "sample":
            deviation, mean = torch.std_mean(_sampled(values, samples, seed), correction=0)
        case "range":
            least, most = values.aminmax()
            mean = torch.std_mean(values)[1]  # a sum, as of mean(), could overflow
            deviation = (most - least) / math.sqrt(2 * math.log(values.numel()))
    return mean, torch.where(deviation == 0, 1.0, deviation)


def _sampled(values: Tensor, samples: int, seed: Tensor) -> Tensor:
    """Return different elements at random: the first of a permutation of all, dear as it is, as the authors do."""
    words = random_words(seed, values.numel(), values.numel(), values.device)  # behind those that rounding uses
    return values[words.argsort(stable=True)[:samples]]
