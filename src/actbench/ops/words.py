"""Random words as an operator: compilers trace it and never see the number that a seed holds.

``random_words(seed, first, count, device)`` gives words ``first ..`` of a seed, 64 random bits each, the same on every
device. What is drawn from them (rows, fractions) is made with torch's own operators, so it needs no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actbench.ops import noise
from actbench.ops.library import HOST_NUMBER, define


def _check(seed: Tensor, first: int, count: int) -> None:
    torch._check_value(seed.dtype == torch.int64 and seed.dim() == 0, lambda: "the seed must be a 0-d int64 tensor")
    torch._check_value(first >= 0 and count >= 0, lambda: "the first word and their count are not negative")


def _make(seed: Tensor, first: int, count: int, device: torch.device) -> Tensor:
    _check(seed, first, count)
    return noise.words(int(seed.item()), first, count, device)


def _fake(seed: Tensor, first: int, count: int, device: torch.device) -> Tensor:
    _check(seed, first, count)
    return torch.empty(count, dtype=torch.int64, device=device)


define(
    "random_words(Tensor seed, SymInt first, SymInt count, Device device) -> Tensor",
    {"CPU": _make},  # where the seed is
    _fake,
    tags=HOST_NUMBER,
)


def random_words(seed: Tensor, first: int, count: int, device: torch.device) -> Tensor:
    """Return words ``first .. first + count - 1`` of a seed.

    Args:
        seed: 0-d int64 tensor on the CPU.
        first: Index of the first word.
        count: How many.
        device: Where to make them.

    Returns:
        (count,) int64 on ``device``, all 64 bits random.

    Raises:
        ValueError: The seed is not as above, or a number is negative.
    """
    made: Tensor = torch.ops.actbench.random_words.default(seed, first, count, device)
    return made
